"""Jamba: Mamba layers with norms on B, C and the time step, a few with attention and no positions, experts in some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.mamba import SCAN_RULES
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules


@dataclass(frozen=True, kw_only=True)
class Jamba(TinyTransformer):
    """Heads are `n_embd / n_head` wide. A layer has experts if its router is in the file: every second one here.

    attention_layers : the layers with attention; llama.cpp sees them by their number of KV heads, which is a list.
    n_expert : 0 = a plain FFN everywhere.
    """

    arch: ClassVar[str] = "jamba"
    head_dim: int = 16
    n_ff: int = 48
    attention_layers: tuple[int, ...] = (1,)
    d_conv: int = 4
    d_state: int = 16
    dt_rank: int = 8
    n_expert: int = 4
    n_expert_used: int = 2

    @property
    def routing(self) -> tuple[int, int]:
        return self.n_expert, self.n_expert_used

    def hparams(self) -> Hparams:
        found = {
            **self.basics(),
            Keys.Attention.HEAD_COUNT: self.n_head,
            Keys.Attention.HEAD_COUNT_KV: [
                self.n_head_kv if il in self.attention_layers else 0 for il in range(self.n_layer)
            ],
            Keys.Attention.LAYERNORM_RMS_EPS: self.rms_eps,
            Keys.SSM.CONV_KERNEL: self.d_conv,
            Keys.SSM.INNER_SIZE: 2 * self.n_embd,
            Keys.SSM.STATE_SIZE: self.d_state,
            Keys.SSM.TIME_STEP_RANK: self.dt_rank,
        }
        if self.n_expert:
            found |= {Keys.LLM.EXPERT_COUNT: self.n_expert, Keys.LLM.EXPERT_USED_COUNT: self.n_expert_used}
        return found

    def tensors(self) -> Shapes:
        per_layer = (self._mixer(il) | self._ffn(il) for il in range(self.n_layer))
        return blocks.ends(self, is_tied=False) | blocks.layers(per_layer)

    def _mixer(self, il: int) -> Shapes:
        norm = blocks.norms(self.n_embd, "attn_norm", "ffn_norm")
        if il in self.attention_layers:
            return norm | blocks.attention(self)
        shapes = norm | blocks.scan_per_channel(self.n_embd, self.d_conv, self.d_state, self.dt_rank)
        state = (self.d_state,)
        return shapes | {"ssm_dt_norm.weight": (self.dt_rank,), "ssm_b_norm.weight": state, "ssm_c_norm.weight": state}

    def _ffn(self, il: int) -> Shapes:
        if self.n_expert and il % 2:
            return blocks.experts(self.n_embd, self.n_ff, self.n_expert)
        return blocks.gated_ffn(self.n_embd, self.n_ff)

    def rules(self) -> Rules:
        return SCAN_RULES


MODELS = {
    "jamba-4l": Jamba(seed=251),
    "jamba-3l-wide-dense": Jamba(
        seed=252,
        n_layer=3,
        n_embd=96,
        n_head=3,
        n_head_kv=1,
        head_dim=32,
        attention_layers=(0, 2),
        n_expert=0,
        n_expert_used=0,
        d_state=8,
        d_conv=3,
    ),
    "jamba-4l-f16": Jamba(seed=251, matrices="f16"),
}
