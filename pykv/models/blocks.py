"""Parts of graphs that several families share, as functions of a `GraphBuilder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykv.ggml import Tensor, ops
from pykv.models.graph_builder import GraphBuilder
from pykv.models.weights import LayerWeights


@dataclass(frozen=True)
class Affine:
    """A matrix or the scale of a norm, and what is added behind it."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def take(cls, w: LayerWeights, name: str, *ne: int, needs_bias: bool = False) -> Self:
        """Return ``<name>.weight`` [*ne] with ``<name>.bias`` [ne[-1]], which may be missing unless it is needed."""
        bias = w.need(f"{name}.bias", ne[-1]) if needs_bias else w.maybe(f"{name}.bias", ne[-1])
        return cls(w.need(f"{name}.weight", *ne), bias)


def layer_norm(b: GraphBuilder, x: Tensor, norm: Affine, eps: float) -> Tensor:
    """Return each column less its mean, over its deviation, scaled and shifted."""
    x = ops.mul(b.arena, ops.norm(b.arena, x, eps), norm.weight)
    return x if norm.bias is None else ops.add(b.arena, x, norm.bias)


def split_qkv(
    b: GraphBuilder, x: Tensor, n_head: int, n_head_kv: int, head_k: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [head, n_head, n_tokens], which lie one below another in each column; q is copied out."""

    def part(n: int, head: int, at: int) -> Tensor:
        size, column = x.dtype.row_size, x.nb[1]
        return ops.view(b.arena, x, (head, n, x.ne[1], 1), (size(head), column, column * x.ne[1]), size(at))

    n_q, n_k = n_head * head_k, n_head_kv * head_k
    q = ops.cont(b.arena, part(n_head, head_k, 0))
    return q, part(n_head_kv, head_k, n_q), part(n_head_kv, head_v, n_q + n_k)
