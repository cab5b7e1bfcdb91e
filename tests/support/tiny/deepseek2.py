"""DeepSeek 2 and 3: latent attention, where K and V of all heads are read out of one short vector per token.

`attn_k_b` and `attn_v_b` are separate and per head, as converters store them today; older files have one `attn_kv_b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import gguf
from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, around, mixing


@dataclass(frozen=True, kw_only=True)
class DeepSeek2(TinyTransformer):
    """The first `n_dense` layers have a plain FFN, the others experts and shared experts.

    q_rank : width of the queries' bottleneck, 0 = none. llama.cpp does without the key only for the layer counts of
        the small models, 26 and 27; elsewhere it is written as 0.
    nope_dim, rope_dim, v_dim : per head: dims of K without RoPE, with RoPE (one for all heads), dims of V.
    is_v3 : router weights by sigmoid, with a bias that counts for the choice only.
    is_absorbed : the file is of today's kind.
    is_merged : gate and up of the experts are one tensor.
    n_group, n_group_used : experts come in groups, 0 = not.
    temperature : by how much queries grow every 50 positions, as in Mistral Large.
    """

    arch: ClassVar[str] = "deepseek2"
    q_rank: int = 0
    kv_rank: int = 32
    nope_dim: int = 16
    rope_dim: int = 16
    v_dim: int = 24
    n_dense: int = 1
    n_expert: int = 4
    n_expert_used: int = 2
    n_shared: int = 1
    n_ff_exp: int = 32
    is_v3: bool = False
    yarn_factor: float = 1.0
    is_absorbed: bool = True
    is_merged: bool = False
    n_group: int = 0
    n_group_used: int = 0
    temperature: float = 0.0

    @property
    def routing(self) -> tuple[int, int]:
        return self.n_expert, self.n_expert_used

    def hparams(self) -> Hparams:
        found = {
            **self.basics(),
            **self._head_keys(),
            Keys.Attention.KV_LORA_RANK: self.kv_rank,
            Keys.Attention.LAYERNORM_RMS_EPS: self.rms_eps,
            Keys.Rope.DIMENSION_COUNT: self.rope_dim,
            Keys.Rope.FREQ_BASE: self.rope_base,
        }
        if self.q_rank or self.n_layer not in {26, 27}:
            found[Keys.Attention.Q_LORA_RANK] = self.q_rank
        return found | self._expert_keys() | self._yarn_keys() | self._temperature_keys()

    def _head_keys(self) -> Hparams:
        head_k = self.nope_dim + self.rope_dim
        if not self.is_absorbed:
            return {
                Keys.Attention.HEAD_COUNT: self.n_head,
                Keys.Attention.HEAD_COUNT_KV: self.n_head,
                Keys.Attention.KEY_LENGTH: head_k,
                Keys.Attention.VALUE_LENGTH: self.v_dim,
            }
        return {
            Keys.Attention.HEAD_COUNT: self.n_head,
            Keys.Attention.HEAD_COUNT_KV: 1,
            Keys.Attention.KEY_LENGTH: self.kv_rank + self.rope_dim,
            Keys.Attention.VALUE_LENGTH: self.kv_rank,
            Keys.Attention.KEY_LENGTH_MLA: head_k,
            Keys.Attention.VALUE_LENGTH_MLA: self.v_dim,
        }

    def _temperature_keys(self) -> Hparams:
        if not self.temperature:
            return {}
        return {
            Keys.Attention.TEMPERATURE_SCALE: self.temperature,
            "{arch}.attention.temperature_length": 50,
        }

    def _expert_keys(self) -> Hparams:
        kinds = gguf.ExpertGatingFuncType
        groups = {Keys.LLM.EXPERT_GROUP_COUNT: self.n_group, Keys.LLM.EXPERT_GROUP_USED_COUNT: self.n_group_used}
        return (groups if self.n_group else {}) | {
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT: self.n_dense,
            Keys.LLM.EXPERT_COUNT: self.n_expert,
            Keys.LLM.EXPERT_USED_COUNT: self.n_expert_used,
            Keys.LLM.EXPERT_SHARED_COUNT: self.n_shared,
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: self.n_ff_exp,
            Keys.LLM.EXPERT_WEIGHTS_SCALE: 1.5,
            Keys.LLM.EXPERT_WEIGHTS_NORM: self.is_v3,
            Keys.LLM.EXPERT_GATING_FUNC: int(kinds.SIGMOID if self.is_v3 else kinds.SOFTMAX),
        }

    def _yarn_keys(self) -> Hparams:
        if self.yarn_factor == 1.0:
            return {}
        return {
            Keys.Rope.SCALING_TYPE: "yarn",
            Keys.Rope.SCALING_FACTOR: self.yarn_factor,
            Keys.Rope.SCALING_ORIG_CTX_LEN: 128,
            Keys.Rope.SCALING_YARN_LOG_MUL: 0.0707,
        }

    def tensors(self) -> Shapes:
        dense = self._attention() | blocks.gated_ffn(self.n_embd, self.n_ff)
        routed = self._attention() | self._experts()
        per_layer = [dense] * self.n_dense + [routed] * (self.n_layer - self.n_dense)
        return blocks.ends(self, is_tied=False) | blocks.layers(per_layer)

    def _attention(self) -> Shapes:
        d, rank, heads = self.n_embd, self.kv_rank, self.n_head
        q = heads * (self.nope_dim + self.rope_dim)
        shapes = blocks.norms(d, "attn_norm", "ffn_norm")
        if self.q_rank:
            shapes |= {"attn_q_a.weight": (self.q_rank, d), "attn_q_a_norm.weight": (self.q_rank,)}
            shapes |= {"attn_q_b.weight": (q, self.q_rank)}
        else:
            shapes |= {"attn_q.weight": (q, d)}
        if self.is_absorbed:
            shapes |= {"attn_k_b.weight": (heads, rank, self.nope_dim), "attn_v_b.weight": (heads, self.v_dim, rank)}
        else:
            shapes |= {"attn_kv_b.weight": (heads * (self.nope_dim + self.v_dim), rank)}
        return shapes | {
            "attn_kv_a_mqa.weight": (rank + self.rope_dim, d),
            "attn_kv_a_norm.weight": (rank,),
            "attn_output.weight": (d, heads * self.v_dim),
        }

    def _experts(self) -> Shapes:
        shapes = blocks.experts(self.n_embd, self.n_ff_exp, self.n_expert)
        if self.is_merged:
            del shapes["ffn_gate_exps.weight"], shapes["ffn_up_exps.weight"]
            shapes["ffn_gate_up_exps.weight"] = (self.n_expert, 2 * self.n_ff_exp, self.n_embd)
        shapes |= blocks.gated_ffn(self.n_embd, self.n_ff_exp * self.n_shared, "_shexp")
        return shapes | ({"exp_probs_b.bias": (self.n_expert,)} if self.is_v3 else {})

    def rules(self) -> Rules:
        added = mixing(min(1.0, (4 / self.n_layer) ** 0.5))  # many layers amplify rounding, unless each adds little
        return (
            ("*attn_output.weight", added),
            ("*ffn_down*.weight", added),
            ("*exp_probs_b.bias", around(0.0, 0.1 if self.n_group else 0.02)),  # in a group, more are nearly equal
            ("*attn_q_b.weight", mixing(2.0)),
            ("*attn_kv_a_mqa.weight", mixing(1.5)),
            ("*attn_k_b.weight", mixing(1.5 * (self.nope_dim / self.kv_rank) ** 0.5)),  # the rank is summed over
        )


MODELS = {
    "deepseek2-3l": DeepSeek2(seed=141, n_layer=3),
    "deepseek2-4l-qrank": DeepSeek2(seed=142, q_rank=24, n_dense=2),
    "deepseek2-2l-wide-v3": DeepSeek2(
        seed=143,
        n_layer=2,
        n_embd=96,
        n_head=3,
        q_rank=32,
        kv_rank=64,
        nope_dim=32,
        rope_dim=32,
        v_dim=32,
        n_expert=8,
        n_expert_used=3,
        n_shared=2,
        is_v3=True,
    ),
    "deepseek2-27l-lite": DeepSeek2(seed=145, n_layer=27, n_embd=32, n_head=2, n_ff=48, n_ff_exp=16),
    "deepseek2-3l-yarn": DeepSeek2(seed=144, n_layer=3, yarn_factor=8.0),
    "deepseek2-3l-groups-merged": DeepSeek2(
        seed=147, n_layer=3, n_expert=8, n_expert_used=3, n_group=2, n_group_used=1, is_v3=True, is_merged=True
    ),
    "deepseek2-3l-unabsorbed": DeepSeek2(seed=148, n_layer=3, is_absorbed=False, temperature=0.3),
    "deepseek2-3l-temperature": DeepSeek2(seed=149, n_layer=3, temperature=0.3),
    "deepseek2-3l-qrank-f16": DeepSeek2(seed=146, n_layer=3, q_rank=24, matrices="f16"),
}
