"""Attention as a mixer: grouped queries, rotated if the layer's heads are, heads normed where there are norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykv.ggml import Tensor
from pykv.models.blocks import Projections, project
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.weights import LayerWeights


@dataclass(frozen=True)
class SelfAttention:
    """Weights of one layer's attention; norms of heads are None where there are none.

    Attributes
    ----------
    scale : factor on scores.
    """

    hparams: HParams
    qkv: Projections
    q_norm: Tensor | None
    k_norm: Tensor | None
    wo: Tensor
    scale: float

    @classmethod
    def take(cls, w: LayerWeights, hp: HParams, il: int, scale: float, *, has_norms: bool = False) -> Self:
        """Take the weights of layer `il`."""
        head = hp.n_embd_head_k
        return cls(
            hparams=hp,
            qkv=Projections.take(w, hp, il),
            q_norm=w.need("attn_q_norm.weight", head) if has_norms else None,
            k_norm=w.need("attn_k_norm.weight", head) if has_norms else None,
            wo=w.need("attn_output.weight", hp.n_head_by_layer[il] * hp.n_embd_head_v, hp.n_embd),
            scale=scale,
        )

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return what the tokens of `x` [n_embd, n_tokens] see; their K and V are stored."""
        q, k, v = project(b, self.qkv, self.hparams, x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = b.rms_norm(q, self.q_norm, eps), b.rms_norm(k, self.k_norm, eps)
        q, k = b.rope(il, q), b.rope(il, k)
        b.kv.store(il, k, v)
        return b.linear(b.attend(il, q, self.scale), self.wo)
