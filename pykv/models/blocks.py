"""Parts of graphs that several families share, as functions of a `GraphBuilder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykv.ggml import Tensor, ops
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.weights import LayerWeights, Use, Weights


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


def affine(b: GraphBuilder, x: Tensor, a: Affine) -> Tensor:
    """Return weight · x + bias."""
    return b.linear(x, a.weight, a.bias)


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


@dataclass(frozen=True)
class Projections:
    """What makes Q, K and V of a layer's input, each with a matrix of its own."""

    q: Affine
    k: Affine
    v: Affine

    @classmethod
    def take(cls, w: LayerWeights, hp: HParams, il: int) -> Self:
        """Return those of layer `il`; biases may be missing."""
        n, n_head, n_head_kv = hp.n_embd, hp.n_head_by_layer[il], hp.n_head_kv_by_layer[il]
        return cls(
            q=Affine.take(w, "attn_q", n, n_head * hp.n_embd_head_k),
            k=Affine.take(w, "attn_k", n, n_head_kv * hp.n_embd_head_k),
            v=Affine.take(w, "attn_v", n, n_head_kv * hp.n_embd_head_v),
        )


def project(b: GraphBuilder, p: Projections, hp: HParams, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads of Q, K and V, [head, n_head, n_tokens]."""
    q, k, v = (affine(b, x, one) for one in (p.q, p.k, p.v))
    return b.heads(q, hp.n_embd_head_k), b.heads(k, hp.n_embd_head_k), b.heads(v, hp.n_embd_head_v)


@dataclass(frozen=True)
class GatedFFN:
    """A feed-forward network whose inner part is multiplied by a gate."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, n_ff: int, suffix: str = "") -> Self:
        """Return that of a layer; `suffix` is "_shexp" for an expert that every token meets."""
        return cls(
            gate=w.need(f"ffn_gate{suffix}.weight", n_embd, n_ff),
            up=w.need(f"ffn_up{suffix}.weight", n_embd, n_ff),
            down=w.need(f"ffn_down{suffix}.weight", n_ff, n_embd),
        )


def take_embeddings(weights: Weights, hp: HParams) -> Tensor:
    """Take the table of token embeddings."""
    return weights.need("token_embd.weight", (hp.n_embd, hp.n_vocab), weights.placement.input, Use.LOOKUP)


def take_output(weights: Weights, hp: HParams) -> Tensor:
    """Take the matrix that makes logits: the file's own, or the token embeddings once more."""
    ne, device = (hp.n_embd, hp.n_vocab), weights.placement.output
    own = weights.maybe("output.weight", ne, device)
    # tied: a second header, since the output may live on another device
    return weights.need("token_embd.weight", ne, device) if own is None else own


def silu_ffn(b: GraphBuilder, x: Tensor, ffn: GatedFFN) -> Tensor:
    """Return down · (silu(gate · x) * (up · x))."""
    return b.linear(b.swiglu(b.linear(x, ffn.gate), b.linear(x, ffn.up)), ffn.down)


def soft_cap(b: GraphBuilder, x: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(x / cap), or x where the cap is 0."""
    if not cap:
        return x
    return ops.scale(b.arena, ops.tanh(b.arena, ops.scale(b.arena, x, 1.0 / cap)), cap)
