"""Qwen3-Next: gated delta nets, every n-th layer attention with a gate on its output instead, experts in each.

A delta net keeps a matrix per head that decays and is corrected towards each token's key and value. Q, K and V
go through a short convolution first, so its state has two parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, around, mixing


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(TinyTransformer):
    """Layers interval - 1, 2 interval - 1, ... have attention.

    d_state : size of a key and of a value head of the delta nets; n_key_head of them are shared by n_value_head.
    n_rot : rotated dims of an attention head, from the first one on.
    """

    arch: ClassVar[str] = "qwen3next"
    n_rot: int = 8
    interval: int = 4
    d_conv: int = 4
    d_state: int = 16
    n_key_head: int = 2
    n_value_head: int = 4
    n_expert: int = 4
    n_expert_used: int = 2
    n_ff_exp: int = 32
    rope_base: float = 1e6

    @property
    def routing(self) -> tuple[int, int]:
        return self.n_expert, self.n_expert_used

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            **self.heads(),
            Keys.Rope.DIMENSION_COUNT: self.n_rot,
            Keys.Rope.FREQ_BASE: self.rope_base,
            Keys.LLM.FULL_ATTENTION_INTERVAL: self.interval,
            Keys.LLM.EXPERT_COUNT: self.n_expert,
            Keys.LLM.EXPERT_USED_COUNT: self.n_expert_used,
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: self.n_ff_exp,
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: self.n_ff_exp,
            Keys.SSM.CONV_KERNEL: self.d_conv,
            Keys.SSM.STATE_SIZE: self.d_state,
            Keys.SSM.GROUP_COUNT: self.n_key_head,
            Keys.SSM.TIME_STEP_RANK: self.n_value_head,
            Keys.SSM.INNER_SIZE: self.d_state * self.n_value_head,
        }

    def tensors(self) -> Shapes:
        kinds = (self._delta_net() if (il + 1) % self.interval else self._attention() for il in range(self.n_layer))
        return blocks.ends(self, is_tied=False) | blocks.layers(kind | self._ffn() for kind in kinds)

    def _ffn(self) -> Shapes:
        d = self.n_embd
        shapes = blocks.norms(d, "attn_norm", "post_attention_norm")
        shapes |= blocks.experts(d, self.n_ff_exp, self.n_expert) | blocks.gated_ffn(d, self.n_ff_exp, "_shexp")
        return shapes | {"ffn_gate_inp_shexp.weight": (d,)}

    def _attention(self) -> Shapes:
        # per head: the query, then the gate of what the head gives
        q = {"attn_q.weight": (2 * self.n_head * self.head_dim, self.n_embd)}
        return blocks.attention(self) | q | blocks.qk_norms(self)

    def _delta_net(self) -> Shapes:
        d, values = self.n_embd, self.d_state * self.n_value_head
        n_conv = 2 * self.d_state * self.n_key_head + values
        return {
            "attn_qkv.weight": (n_conv, d),
            "attn_gate.weight": (values, d),
            "ssm_ba.weight": (2 * self.n_value_head, d),
            "ssm_conv1d.weight": (n_conv, self.d_conv),
            "ssm_dt.bias": (self.n_value_head,),
            "ssm_a": (self.n_value_head,),
            "ssm_norm.weight": (self.d_state,),
            "ssm_out.weight": (d, values),
        }

    def rules(self) -> Rules:
        return (
            # q and k are of unit size, so their norms make scores sharp
            ("*attn_[qk]_norm.weight", around(1.7)),
            ("*ffn_gate_inp_shexp.weight", around(0.0, self.n_embd**-0.5)),
            ("*ssm_conv1d.weight", mixing(2.0)),
        )


MODELS = {
    "qwen3next-4l": Qwen3Next(seed=241),
    "qwen3next-5l-wide-every2": Qwen3Next(
        seed=242,
        n_layer=5,
        n_head=2,
        n_head_kv=1,
        head_dim=64,
        n_rot=16,
        interval=2,
        d_conv=3,
        d_state=32,
        n_value_head=2,
        n_expert=8,
        n_expert_used=3,
        n_ff_exp=16,
    ),
    "qwen3next-4l-f16": Qwen3Next(seed=241, matrices="f16"),
}
