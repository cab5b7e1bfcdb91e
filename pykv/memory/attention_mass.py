"""Attention mass: how much of the attention of some queries each cell received, beside the attention itself.

The fused path keeps the weights that it computes anyway of a few rows, and so does `GROUPED`; beside `FLASH`, which
never holds them, beside many rows of the fused path, and for a few rows out of many, they are computed once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from pykv.cells.arguments import boolean, integer, shown
from pykv.errors import ParamError
from pykv.ggml import Arena, DType, GraphInput, Tensor, ops
from pykv.memory.attention import (
    AttentionParams,
    AttentionPath,
    KVView,
    attend,
    attention_weights,
    grouped,
    v_in_rows,
)
from pykv.typing import BoolArray, F32Array, I32Array

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class AttentionMass:
    """Which part of the attention to add up for each cell.

    A query's share of a cell is the softmax weight that it gives to the value there; they come to 1 over all cells.

    Attributes
    ----------
    heads : query heads that count; None = all. Stored as a tuple, ascending.
    per_kv_head : one row for each KV head, of the query heads that read it, instead of one for all.
    largest : the largest share instead of the sum.
    last : count only the last so many tokens of each sequence in a batch; None = all of its tokens.

    Raises
    ------
    ParamError : names the field, its value and the limit.
    """

    heads: tuple[int, ...] | None = None
    per_kv_head: bool = False
    largest: bool = False
    last: int | None = None

    def __post_init__(self) -> None:
        if self.heads is not None:
            object.__setattr__(self, "heads", indices("heads", self.heads, _INT_MAX))
        for name in ("per_kv_head", "largest"):
            object.__setattr__(self, name, boolean(name, getattr(self, name)))
        if self.last is not None:
            object.__setattr__(self, "last", integer("last", self.last, 1, _INT_MAX))

    def check_heads(self, n_head: int) -> None:
        """Raise `ParamError` unless a layer of `n_head` query heads has all that are asked for."""
        if self.heads is not None and self.heads[-1] >= n_head:
            raise ParamError(f"heads: there is no head {self.heads[-1]}, the layer has heads 0 to {n_head - 1}")

    def head_weights(self, n_head: int) -> F32Array:
        """Return (n_head,) 1 for heads that count, else 0."""
        out = np.ones(n_head, np.float32) if self.heads is None else np.zeros(n_head, np.float32)
        out[[] if self.heads is None else list(self.heads)] = 1.0
        return out

    def chosen(self, seqs: I32Array) -> BoolArray:
        """Return (n,) which tokens count, given the sequence through which each sees, in their order."""
        if self.last is None or seqs.size <= self.last:
            return np.ones(seqs.size, np.bool_)
        order = np.argsort(seqs, kind="stable")
        in_groups = seqs[order]
        ends = np.searchsorted(in_groups, in_groups, side="right")
        chosen = np.empty(seqs.size, np.bool_)
        chosen[order] = ends - np.arange(seqs.size) <= self.last
        return chosen


@dataclass(frozen=True)
class MassWatch:
    """What a graph is to observe; part of what it is built for.

    Attributes
    ----------
    layers : whose attention.
    what : which part of it.
    n_rows : tokens of a stream that count, at most.
    """

    layers: frozenset[int]
    what: AttentionMass
    n_rows: int

    def up_to(self, n_rows: int) -> MassWatch:
        """Return a watch over at most so many rows of a stream."""
        return self if self.n_rows <= n_rows else replace(self, n_rows=n_rows)


class MassGraph:
    """The nodes that observe attention in one graph, and the inputs that say which heads and rows count.

    Attributes
    ----------
    masses : layer → [n_kv, Hk or 1, S] f32, once its attention has been built.
    """

    def __init__(self, arena: Arena, path: AttentionPath, watch: MassWatch, n: int, n_stream: int) -> None:
        self.masses: dict[int, Tensor] = {}
        self._arena, self._path, self._watch = arena, path, watch
        self._shape = n, n_stream
        self._keeps_weights = path is AttentionPath.FUSED and n <= ops.FUSED_MAX_ROWS
        self._n_rows = n if self._keeps_weights else min(n, watch.n_rows)
        self._row_weight: GraphInput | None = None
        self._head_weights: dict[int, GraphInput] = {}
        self._counts: dict[tuple[int, int], GraphInput] = {}
        self._index: GraphInput | None = None
        self._mask: Tensor | None = None

    @property
    def what(self) -> AttentionMass:
        """Which part of the attention is added up."""
        return self._watch.what

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes."""
        single = (self._row_weight, self._index)
        return (*(one for one in single if one is not None), *self._head_weights.values(), *self._counts.values())

    def watches(self, il: int) -> bool:
        """Whether a layer is observed."""
        return il in self._watch.layers

    def attend(self, il: int, q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams) -> Tensor:
        """Return attention outputs as `attend` does, with the same values, and note the layer's mass."""
        self.what.check_heads(q.ne[1])
        n, n_stream = self._shape
        rows = ops.reshape(self._arena, q, q.ne[0], q.ne[1], n, n_stream)
        if self._keeps_weights:
            out, mass = self._fused(rows, kv, mask, params)
        elif self._path is AttentionPath.GROUPED and self._n_rows == n:
            out, weights = grouped(self._arena, rows, kv, mask, params)
            mass = self._total(weights, kv.k.ne[1])
        else:
            out = attend(self._arena, self._path, q, kv, mask, params)
            mass = self._beside(rows, kv.k, mask, params)
        self.masses[il] = mass.named(f"attention_mass-{il}").as_output()
        return out

    def fill(self, chosen: BoolArray) -> None:
        """Write the inputs: which tokens of the ubatch count, (n_tokens,).

        Raises
        ------
        ParamError : more of a stream than the graph was built for.
        """
        n, n_stream = self._shape
        rows = np.asarray(chosen, np.bool_).reshape(n_stream, n)
        if (most := int(rows.sum(axis=1).max())) > self._watch.n_rows:
            raise ParamError(f"chosen: {most} tokens of a stream, the graph observes n_rows={self._watch.n_rows}")
        if self._row_weight is not None:
            self._row_weight.array[0, 0] = rows
        for n_head, heads in self._head_weights.items():
            heads.array[0, 0, 0] = self.what.head_weights(n_head)
        if self._index is not None:
            # those that count come first, others fill up where streams differ
            order = np.argsort(~rows, axis=1, kind="stable")[:, : self._n_rows]
            rows = np.take_along_axis(rows, order, axis=1)
            self._index.array[0, 0, 0] = (order + n * np.arange(n_stream)[:, None]).reshape(-1)
        for (n_head, _), counts in self._counts.items():
            weights = self.what.head_weights(n_head)[:, None] * rows[:, None, :]
            counts.array[...] = weights.reshape(counts.array.shape)
        for one in self.inputs:
            one.commit()

    # mechanism

    def _fused(self, q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
        arena, what, n_head = self._arena, self.what, q.ne[1]
        if self._row_weight is None:
            self._row_weight = GraphInput(arena.tensor(DType.F32, self._shape, "row_weight"))
        if n_head not in self._head_weights:
            self._head_weights[n_head] = GraphInput(arena.tensor(DType.F32, (n_head,), "head_weight"))
        of = ops.MassOf(self._head_weights[n_head].tensor, self._row_weight.tensor, what.largest, not what.per_kv_head)
        out, mass = ops.fused_attn_mass(
            arena,
            q,
            kv.k,
            v_in_rows(arena, kv),
            mask,
            of,
            scale=params.scale,
            max_bias=params.alibi_max_bias,
            logit_softcap=params.logit_softcap,
        )
        return ops.reshape(arena, out, out.ne[0], out.ne[1], out.ne[2] * out.ne[3]), mass

    def _beside(self, q: Tensor, k: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
        """Return the mass by weights of the rows that count, computed for it alone."""
        if self._n_rows < self._shape[0]:
            q, mask = self._picked(q), self._picked_mask(mask)
        return self._total(attention_weights(self._arena, q, k, mask, params), k.ne[1])

    def _picked(self, x: Tensor) -> Tensor:
        """Return the rows that count of queries [Dk, H, n, S]."""
        rows = self._gathered(ops.reshape(self._arena, x, x.ne[0] * x.ne[1], x.ne[2] * x.ne[3]))
        return ops.reshape(self._arena, rows, x.ne[0], x.ne[1], self._n_rows, x.ne[3])

    def _picked_mask(self, mask: Tensor) -> Tensor:
        """Return the rows that count of the mask [n_kv, n, 1, S], gathered once for all layers."""
        if self._mask is None:
            rows = self._gathered(ops.reshape(self._arena, mask, mask.ne[0], mask.ne[1] * mask.ne[3]))
            self._mask = ops.reshape(self._arena, rows, mask.ne[0], self._n_rows, 1, mask.ne[3])
        return self._mask

    def _gathered(self, rows: Tensor) -> Tensor:
        if self._index is None:
            n = self._n_rows * self._shape[1]
            self._index = GraphInput(self._arena.tensor(DType.I32, (n,), "observed_rows"))
        return ops.get_rows(self._arena, rows, self._index.tensor)

    def _total(self, weights: Tensor, n_head_kv: int) -> Tensor:
        """Return [n_kv, Hk or 1, S] of weights [n_kv, n, H, S]: the sum, or the largest, of what counts."""
        arena, what = self._arena, self.what
        n_kv, n, n_head, n_stream = weights.ne
        n_groups = n_head_kv if what.per_kv_head else 1
        queries = n * n_head // n_groups
        key = n_head, n_groups
        if key not in self._counts:
            self._counts[key] = GraphInput(arena.tensor(DType.F32, (1, queries, n_groups, n_stream), "counts"))
        counts = self._counts[key].tensor
        weights = ops.reshape(arena, weights, n_kv, queries, n_groups, n_stream)
        if what.largest:
            total = ops.column_max(arena, ops.mul(arena, weights, counts))
        else:
            total = ops.out_prod(arena, weights, counts)
        return ops.reshape(arena, total, n_kv, n_groups, n_stream)


def indices(name: str, given: object, n: int) -> tuple[int, ...]:
    """Return distinct indices below `n`, at least one, ascending.

    Raises
    ------
    ParamError : names what is wrong, and the limit.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ParamError(f"{name} = {shown(given)}: must be a sequence of integers from 0 to {n - 1}, or None")
    found = sorted({integer(name, one, 0, n - 1) for one in given})
    if not found:
        raise ParamError(f"{name} = {shown(given)}: must name at least one; None means all")
    return tuple(found)
