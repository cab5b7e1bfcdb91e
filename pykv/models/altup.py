"""AltUp: several copies of the residual stream. Each block computes with the first and corrects all of them by it.

Streams lie one behind another: [n_embd, n_tokens, n_stream].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykv.ggml import Tensor, ops
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.weights import LayerWeights, Weights


@dataclass(frozen=True)
class AltUp:
    """What makes the other streams of the first one, before the layers, and one of all behind them."""

    n_stream: int
    spread: Tensor
    merge: Tensor

    @classmethod
    def take(cls, weights: Weights, hp: HParams, n_stream: int) -> Self:
        """Take both matrices, one for each stream but the first."""
        ne, place = (hp.n_embd, hp.n_embd, n_stream - 1), weights.placement
        return cls(
            n_stream,
            spread=weights.need("altup_proj.weight", ne, place.layers[0]),
            merge=weights.need("altup_unembd_proj.weight", ne, place.output),
        )


@dataclass(frozen=True)
class AltUpLayer:
    """What decides in one layer how much the streams take of one another."""

    router_norm: Tensor
    router: Tensor
    predict: Tensor
    correct: Tensor

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, n_stream: int) -> Self:
        """Take those of one layer."""
        return cls(
            router_norm=w.need("altup_router_norm.weight", n_embd),
            router=w.need("altup_router.weight", n_embd, n_stream),
            predict=w.need("altup_predict_coef.weight", n_stream, n_stream * n_stream),
            correct=w.need("altup_correct_coef.weight", n_stream, n_stream),
        )


def first(b: GraphBuilder, streams: Tensor) -> Tensor:
    """Return a view of the first stream, [n_embd, n_tokens]."""
    return matrix(b, streams, 0)


def matrix(b: GraphBuilder, x: Tensor, i: int) -> Tensor:
    """Return a view of matrix `i` of a stack."""
    return ops.view(b.arena, x, (x.ne[0], x.ne[1], 1, 1), (x.nb[1], x.nb[2], x.nb[2]), i * x.nb[2])


def rest(b: GraphBuilder, streams: Tensor) -> Tensor:
    """Return a view of all streams but the first."""
    n, n_tokens, n_stream, _ = streams.ne
    _, column, stream, whole = streams.nb
    return ops.view(b.arena, streams, (n, n_tokens, n_stream - 1, 1), (column, stream, whole), stream)


def spread(b: GraphBuilder, altup: AltUp, x: Tensor) -> Tensor:
    """Return the streams that begin with `x` [n_embd, n_tokens]; all are as large as it."""
    n, n_tokens = x.ne[:2]
    copies = ops.repeat(b.arena, x, n, n_tokens, altup.n_stream - 1)
    others = _as_large_as(b, ops.mul_mat(b.arena, altup.spread, copies), x)
    return ops.concat(b.arena, x, others, 2)


def merge(b: GraphBuilder, altup: AltUp, streams: Tensor) -> Tensor:
    """Return the mean of all streams, the others turned back first and made as large as the first."""
    x = first(b, streams)
    others = _as_large_as(b, ops.mul_mat(b.arena, altup.merge, rest(b, streams)), x)
    for i in range(altup.n_stream - 1):
        x = b.add(x, matrix(b, others, i))
    return ops.scale(b.arena, x, 1.0 / altup.n_stream)


def predict(b: GraphBuilder, layer: AltUpLayer, streams: Tensor, eps: float) -> Tensor:
    """Return what a layer takes the streams to become: each, and a mixture of all."""
    n_stream, n_tokens = streams.ne[2], streams.ne[1]
    weights = ops.mul_mat(b.arena, layer.predict, _modalities(b, layer, first(b, streams), eps))
    weights = ops.reshape(b.arena, weights, n_stream, n_stream, n_tokens)
    by_channel = ops.cont(b.arena, ops.permute(b.arena, streams, 1, 2, 0, 3))  # [n_stream, n_embd, n_tokens]
    mixed = ops.mul_mat(b.arena, by_channel, weights)  # [n_embd, n_stream, n_tokens]
    return b.add(ops.cont(b.arena, ops.permute(b.arena, mixed, 0, 2, 1, 3)), streams)


def correct(b: GraphBuilder, layer: AltUpLayer, predictions: Tensor, found: Tensor, eps: float) -> Tensor:
    """Return the predictions, each moved by its share of what the first one missed; `found` [n_embd, n_tokens]."""
    n, n_tokens, n_stream, _ = predictions.ne
    shares = ops.mul_mat(b.arena, layer.correct, _modalities(b, layer, found, eps))
    shares = ops.scale(b.arena, shares, 1.0, 1.0)  # [n_stream, n_tokens]
    shares = ops.cont(b.arena, ops.transpose(b.arena, shares))
    missed = ops.sub(b.arena, found, first(b, predictions))
    missed = ops.repeat(b.arena, missed, n, n_tokens, n_stream)
    moves = ops.mul(b.arena, missed, ops.reshape(b.arena, shares, 1, n_tokens, n_stream))
    return b.add(moves, predictions)


def _modalities(b: GraphBuilder, layer: AltUpLayer, x: Tensor, eps: float) -> Tensor:
    """Return what of each stream is wanted, by `x` [n_embd, n_tokens]: [n_stream, n_tokens] in -1..1."""
    normed = ops.scale(b.arena, b.rms_norm(x, layer.router_norm, eps), 1.0 / x.ne[0])
    return ops.tanh(b.arena, ops.mul_mat(b.arena, layer.router, normed))


def _as_large_as(b: GraphBuilder, others: Tensor, x: Tensor) -> Tensor:
    """Return each column of each stream with the length of the same column of `x`."""
    return ops.div(b.arena, ops.mul(b.arena, others, _length(b, x)), _length(b, others))


def _length(b: GraphBuilder, x: Tensor) -> Tensor:
    return ops.sqrt(b.arena, ops.sum_rows(b.arena, ops.sqr(b.arena, x)))
