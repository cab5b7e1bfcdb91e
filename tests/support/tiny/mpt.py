"""MPT: no positions but ALiBi's slopes in the mask; layer norms without biases; q, k and v from one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, sharpened


@dataclass(frozen=True, kw_only=True)
class Mpt(TinyTransformer):
    """Heads are `n_embd / n_head` wide, as many for K and V as for Q.

    n_head that is no power of two has slopes of two series.
    clamp : limit of the elements of q, k and v; 0 = none.
    has_position : learned positions are added to the embedding, as some of the family do.
    """

    arch: ClassVar[str] = "mpt"
    n_layer: int = 3
    norm_eps: float = 1e-5
    max_bias: float = 8.0
    clamp: float = 0.0
    has_position: bool = False
    n_ctx_train: int = 512

    def hparams(self) -> Hparams:
        found = {
            **self.basics(),
            Keys.Attention.HEAD_COUNT: self.n_head,
            Keys.Attention.LAYERNORM_EPS: self.norm_eps,
            Keys.Attention.MAX_ALIBI_BIAS: self.max_bias,
        }
        return found | ({Keys.Attention.CLAMP_KQV: self.clamp} if self.clamp else {})

    def tensors(self) -> Shapes:
        d = self.n_embd
        block = blocks.norms(d, "attn_norm", "ffn_norm") | blocks.fused_attention(d, has_bias=False)
        block |= blocks.plain_ffn(d, self.n_ff, has_bias=False)
        shapes = blocks.ends(self) | blocks.layers([block] * self.n_layer)
        return shapes | ({"position_embd.weight": (self.n_ctx_train, d)} if self.has_position else {})

    def rules(self) -> Rules:
        return (("*attn_qkv.weight", sharpened(2 * self.n_embd)),)


MODELS = {
    "mpt-3l-4heads": Mpt(seed=211),
    "mpt-2l-wide-6heads-clamp": Mpt(seed=212, n_layer=2, n_embd=96, n_head=6, clamp=2.0, max_bias=4.0),
    "mpt-2l-positions": Mpt(seed=213, n_layer=2, n_head=2, has_position=True, max_bias=0.0),
    "mpt-3l-4heads-f16": Mpt(seed=211, matrices="f16"),
}
