"""BLOOM: ALiBi with a fixed largest bias of 8; a norm after the embedding; biases everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, sharpened


@dataclass(frozen=True, kw_only=True)
class Bloom(TinyTransformer):
    """Heads are `n_embd / n_head` wide, as many for K and V as for Q."""

    arch: ClassVar[str] = "bloom"
    n_layer: int = 3
    norm_eps: float = 1e-5

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            Keys.Attention.HEAD_COUNT: self.n_head,
            Keys.Attention.HEAD_COUNT_KV: self.n_head,
            Keys.Attention.LAYERNORM_EPS: self.norm_eps,
        }

    def tensors(self) -> Shapes:
        d = self.n_embd
        block = blocks.norms(d, "attn_norm", "ffn_norm", has_bias=True) | blocks.fused_attention(d, has_bias=True)
        block |= blocks.plain_ffn(d, self.n_ff, has_bias=True)
        norm = blocks.norms(d, "token_embd_norm", has_bias=True)
        return blocks.ends(self, has_bias=True) | norm | blocks.layers([block] * self.n_layer)

    def rules(self) -> Rules:
        return (("*attn_qkv.weight", sharpened(2 * self.n_embd)),)


MODELS = {
    "bloom-3l-4heads": Bloom(seed=221),
    "bloom-2l-wide-6heads": Bloom(seed=222, n_layer=2, n_embd=96, n_head=6),
    "bloom-3l-4heads-f16": Bloom(seed=221, matrices="f16"),
}
