"""Tiny models of the llama family: llama, qwen2, qwen3. `naive_llama` computes with the same weights.

Other architectures are in `support/tiny/`, which also holds what these share with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyFile

NEOX_ARCHES = ("qwen2", "qwen3")
"""Families whose RoPE pairs lie half a head apart; llama pairs neighbours."""


@dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched: `kind` is "linear" or "yarn", `factor` the stretch."""

    kind: str
    factor: float
    orig_ctx: int = 0
    attn_factor: float = 1.0


@dataclass(frozen=True)
class TinyModel(TinyFile):
    """Shape of one tiny model. `n_embd == n_head * head_dim` is needed for qwen2 only.

    rope_dim : rotated dims of a head, None = all. llama.cpp refuses a part of a head for these families;
        only the naive forward and pykv can be compared there.
    """

    arch: str = "llama"
    n_layer: int = 2
    n_embd: int = 128
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 160
    n_ctx_train: int = 512
    is_tied: bool = True
    has_bias: bool = False
    rms_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    has_rope_factors: bool = False
    rope_dim: int | None = None

    @property
    def n_rot(self) -> int:
        """Rotated dims of a head."""
        return self.head_dim if self.rope_dim is None else self.rope_dim

    @property
    def is_neox(self) -> bool:
        """Whether RoPE pairs lie half a head apart."""
        return self.arch in NEOX_ARCHES

    @property
    def pre(self) -> str:
        return "qwen2" if self.is_neox else "smollm"

    def hparams(self) -> Hparams:
        found: Hparams = {
            Keys.LLM.CONTEXT_LENGTH: self.n_ctx_train,
            Keys.LLM.EMBEDDING_LENGTH: self.n_embd,
            Keys.LLM.BLOCK_COUNT: self.n_layer,
            Keys.LLM.FEED_FORWARD_LENGTH: self.n_ff,
            Keys.Attention.HEAD_COUNT: self.n_head,
            Keys.Attention.HEAD_COUNT_KV: self.n_head_kv,
            Keys.Attention.KEY_LENGTH: self.head_dim,
            Keys.Attention.VALUE_LENGTH: self.head_dim,
            Keys.Attention.LAYERNORM_RMS_EPS: self.rms_eps,
            Keys.LLM.VOCAB_SIZE: self.n_vocab,
            Keys.Rope.DIMENSION_COUNT: self.n_rot,
            Keys.Rope.FREQ_BASE: self.rope_base,
        }
        if (scaling := self.rope_scaling) is not None:
            found |= {Keys.Rope.SCALING_TYPE: scaling.kind, Keys.Rope.SCALING_FACTOR: scaling.factor}
            if scaling.orig_ctx:
                found[Keys.Rope.SCALING_ORIG_CTX_LEN] = scaling.orig_ctx
            if scaling.attn_factor != 1.0:
                found[Keys.Rope.SCALING_ATTN_FACTOR] = scaling.attn_factor
        return found

    def tensors(self) -> Shapes:
        shapes = blocks.ends(self, is_tied=self.is_tied)
        if self.has_rope_factors:
            shapes["rope_freqs.weight"] = (self.n_rot // 2,)
        return shapes | blocks.layers([self._block()] * self.n_layer)

    def _block(self) -> Shapes:
        d = self.n_embd
        block = {"attn_norm.weight": (d,), **blocks.attention(self), "ffn_norm.weight": (d,)}
        block |= blocks.gated_ffn(d, self.n_ff)
        if self.arch == "qwen3":
            block |= blocks.qk_norms(self)
        if self.has_bias:
            block |= blocks.qkv_biases(self)
        if self.has_bias and self.arch == "llama":
            block |= {"attn_output.bias": (d,), "ffn_gate.bias": (self.n_ff,)}
            block |= {"ffn_up.bias": (self.n_ff,), "ffn_down.bias": (d,)}
        return block


YARN = RopeScaling("yarn", 4.0, orig_ctx=128)

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel(seed=1),
    "llama-untied-bias": TinyModel(seed=2, is_tied=False, has_bias=True, rope_base=500000.0),
    "llama-wide-heads": TinyModel(seed=3, n_embd=96, n_head=6, n_head_kv=3, head_dim=64, n_layer=3),
    "llama-mha": TinyModel(seed=4, n_head_kv=4),
    "llama-linear": TinyModel(seed=5, rope_scaling=RopeScaling("linear", 2.0)),
    "llama-yarn": TinyModel(seed=6, rope_scaling=YARN),
    "llama-yarn-attn": TinyModel(seed=7, rope_scaling=RopeScaling("yarn", 8.0, orig_ctx=64, attn_factor=1.25)),
    "llama-factors": TinyModel(seed=8, has_rope_factors=True, rope_base=500000.0),
    "qwen2": TinyModel("qwen2", seed=9, has_bias=True, rope_base=1e6),
    "qwen2-yarn": TinyModel("qwen2", seed=10, has_bias=True, is_tied=False, rope_scaling=YARN),
    "qwen3": TinyModel("qwen3", seed=11, n_embd=96, head_dim=64, rope_base=1e6, rms_eps=1e-6),
}
"""Every option at least once; llama.cpp loads each of them."""

NARROW = TinyModel(n_embd=64, n_head=2, n_head_kv=1, n_ff=96, n_vocab=272)
WIDE = replace(NARROW, n_embd=128, head_dim=64)

SHIFT_MODELS: dict[str, TinyModel] = {
    "norm": replace(NARROW, seed=40),
    "norm-base": replace(NARROW, seed=41, n_layer=3, rope_base=500000.0),
    "norm-linear": replace(NARROW, seed=42, rope_scaling=RopeScaling("linear", 4.0)),
    "norm-factors": replace(NARROW, seed=43, has_rope_factors=True, rope_base=500000.0),
    "norm-yarn": replace(NARROW, seed=44, rope_scaling=YARN),
    "norm-yarn-unit": replace(NARROW, seed=50, rope_scaling=replace(YARN, attn_factor=1 / (1 + 0.1 * math.log(4.0)))),
    "neox": replace(NARROW, arch="qwen2", seed=45, has_bias=True, rope_base=1e6, n_layer=3),
    "neox-linear": replace(NARROW, arch="qwen2", seed=46, rope_scaling=RopeScaling("linear", 2.0)),
    "wide": replace(WIDE, seed=47),
    "wide-factors": replace(WIDE, seed=48, n_layer=3, has_rope_factors=True),
    "wide-neox": replace(WIDE, arch="qwen3", seed=49, rope_base=1e6, rms_eps=1e-6),
}
"""Every way of rotating keys, as small as can be: thousands of programs run on them.

Heads of 64 are those whose quantised keys get Hadamard rotation; "unit" is YaRN that leaves the length of keys alone.
"""
