"""MassGraph: the part of a graph that adds up attention mass, beside the attention itself.

The fused path keeps the weights of a few rows that it computes anyway, and so does `GROUPED`; beside `FLASH`, which
never holds them, beside more rows of the fused path, and for a few rows out of many, they are computed once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykv.errors import ParamError
from pykv.ggml import Arena, DType, Graph, GraphInput, Tensor, ops
from pykv.memory.attention import (
    AttentionParams,
    AttentionPath,
    KVView,
    attend,
    attention_weights,
    grouped,
    v_in_rows,
)
from pykv.memory.attention_mass import AttentionMass, MassWatch
from pykv.typing import BoolArray, F32Array


class MassGraph:
    """The nodes that observe attention in one graph, and the inputs that say which heads and rows count.

    Attributes
    ----------
    watches : what is observed.
    masses : for each watch, layer → [n_kv, Hk or 1, S] f32, once its attention has been built.
    """

    def __init__(self, graph: Graph, path: AttentionPath, watches: Sequence[MassWatch], n: int, n_stream: int) -> None:
        self.watches = tuple(watches)
        self.masses: tuple[dict[int, Tensor], ...] = tuple({} for _ in watches)
        self._graph, self._arena, self._path = graph, graph.arena, path
        self._shape = n, n_stream
        # which rows count depends on `last` alone
        self._rows = {watch.what.last: _Rows(graph.arena, n, n_stream, watch.n_rows) for watch in watches}
        self._head_weights: dict[tuple[int, AttentionMass], GraphInput] = {}
        self._counts: dict[tuple[int, int, AttentionMass], GraphInput] = {}

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes."""
        of_rows = (one for rows in self._rows.values() for one in rows.inputs)
        return (*of_rows, *self._head_weights.values(), *self._counts.values())

    def observes(self, il: int) -> bool:
        """Whether a layer is observed."""
        return any(il in watch.layers for watch in self.watches)

    def attend(self, il: int, q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams) -> Tensor:
        """Return attention outputs as `attend` does, with the same values, and add nodes for the layer's masses."""
        seen = [watch for watch in self.watches if il in watch.layers]
        for watch in seen:
            watch.what.check_heads(q.ne[1])
        rows = ops.reshape(self._arena, q, q.ne[0], q.ne[1], *self._shape)
        if self._path is AttentionPath.FUSED and self._shape[0] <= ops.FUSED_MAX_ROWS:
            out, masses = self._fused(seen, rows, kv, mask, params)
        else:
            out, weights = self._attended(q, rows, kv, mask, params)
            masses = self._beside(seen, rows, kv.k, mask, params, weights)
        found = iter(masses)
        for watch, by_layer in zip(self.watches, self.masses, strict=True):
            if il in watch.layers:
                by_layer[il] = next(found).named(f"attention_mass-{il}").as_output()
                self._graph.expand(by_layer[il])
        return out

    def fill(self, chosen: Sequence[BoolArray]) -> None:
        """Write the inputs: for each watch which tokens of the ubatch count, (n_tokens,).

        Raises
        ------
        ParamError : more of a stream than the graph was built for.
        """
        n, n_stream = self._shape
        count = {}
        for watch, one in zip(self.watches, chosen, strict=True):
            count[watch.what.last] = np.asarray(one, np.bool_).reshape(n_stream, n)
        picked = {last: rows.fill(count[last]) for last, rows in self._rows.items()}
        for (n_head, what), heads in self._head_weights.items():
            heads.array[0, 0, 0] = what.head_weights(n_head)
        for (n_head, _, what), counts in self._counts.items():
            weights = what.head_weights(n_head)[:, None] * picked[what.last][:, None, :]
            counts.array[...] = weights.reshape(counts.array.shape)
        for one_input in self.inputs:
            one_input.commit()

    # the fused path

    def _fused(
        self, seen: Sequence[MassWatch], q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs, and the mass of each watch."""
        out, masses = ops.fused_attn_masses(
            self._arena,
            q,
            kv.k,
            v_in_rows(self._arena, kv),
            mask,
            [self._mass_of(watch.what, q.ne[1]) for watch in seen],
            sinks=params.sinks,
            scale=params.scale,
            max_bias=params.alibi_max_bias,
            logit_softcap=params.logit_softcap,
        )
        return ops.reshape(self._arena, out, out.ne[0], out.ne[1], out.ne[2] * out.ne[3]), masses

    def _mass_of(self, what: AttentionMass, n_head: int) -> ops.MassOf:
        key = n_head, what
        if key not in self._head_weights:
            self._head_weights[key] = GraphInput(self._arena.tensor(DType.F32, (n_head,), "head_weight"))
        row_weight = self._rows[what.last].weights
        return ops.MassOf(self._head_weights[key].tensor, row_weight, what.largest, not what.per_kv_head)

    # the other paths

    def _attended(
        self, q: Tensor, rows: Tensor, kv: KVView, mask: Tensor, params: AttentionParams
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and the weights [n_kv, n, H, S] where the path holds them."""
        if self._path is AttentionPath.GROUPED:
            return grouped(self._arena, rows, kv, mask, params)
        return attend(self._arena, self._path, q, kv, mask, params), None

    def _beside(
        self,
        seen: Sequence[MassWatch],
        q: Tensor,
        k: Tensor,
        mask: Tensor,
        params: AttentionParams,
        weights: Tensor | None,
    ) -> list[Tensor]:
        """Return the mass of each watch by weights of the rows that count, computed for it unless they are there."""
        of_some: dict[int | None, Tensor] = {}
        masses = []
        for watch in seen:
            rows, last = self._rows[watch.what.last], watch.what.last
            if rows.are_all and weights is None:
                weights = attention_weights(self._arena, q, k, mask, params)
            elif not rows.are_all and last not in of_some:
                some = rows.queries(q), k, rows.mask(mask)
                of_some[last] = attention_weights(self._arena, *some, params)
            counted = weights if rows.are_all else of_some[last]
            assert counted is not None
            masses.append(self._total(counted, watch.what, k.ne[1]))
        return masses

    def _total(self, weights: Tensor, what: AttentionMass, n_head_kv: int) -> Tensor:
        """Return [n_kv, Hk or 1, S] of weights [n_kv, n, H, S]: the sum, or the largest, of what counts."""
        arena = self._arena
        n_kv, n, n_head, n_stream = weights.ne
        n_groups = n_head_kv if what.per_kv_head else 1
        queries = n * n_head // n_groups
        key = n_head, n_groups, what
        if key not in self._counts:
            self._counts[key] = GraphInput(arena.tensor(DType.F32, (1, queries, n_groups, n_stream), "counts"))
        counts = self._counts[key].tensor
        weights = ops.reshape(arena, weights, n_kv, queries, n_groups, n_stream)
        if what.largest:
            total = ops.column_max(arena, ops.mul(arena, weights, counts))
        else:
            total = ops.out_prod(arena, weights, counts)
        return ops.reshape(arena, total, n_kv, n_groups, n_stream)


class _Rows:
    """Which rows of a ubatch count, as a graph is told: `n_rows` of each stream's `n` at most.

    Attributes
    ----------
    are_all : whether the graph looks at all rows, those that do not count with a weight of 0.
    """

    def __init__(self, arena: Arena, n: int, n_stream: int, n_rows: int) -> None:
        self._arena, self._n, self._n_stream = arena, n, n_stream
        self._n_rows = min(n, n_rows)
        self.are_all = self._n_rows == n
        self._weights: GraphInput | None = None
        self._index: GraphInput | None = None
        self._mask: Tensor | None = None

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes."""
        return tuple(one for one in (self._weights, self._index) if one is not None)

    @property
    def weights(self) -> Tensor:
        """What each row counts, [n, S]."""
        if self._weights is None:
            tensor = self._arena.tensor(DType.F32, (self._n, self._n_stream), "row_weight")
            self._weights = GraphInput(tensor)
        return self._weights.tensor

    def queries(self, q: Tensor) -> Tensor:
        """Return the rows that count of queries [Dk, H, n, S]."""
        rows = self._gathered(ops.reshape(self._arena, q, q.ne[0] * q.ne[1], q.ne[2] * q.ne[3]))
        return ops.reshape(self._arena, rows, q.ne[0], q.ne[1], self._n_rows, q.ne[3])

    def mask(self, mask: Tensor) -> Tensor:
        """Return the rows that count of the mask [n_kv, n, 1, S], gathered once for all layers."""
        if self._mask is None:
            rows = self._gathered(ops.reshape(self._arena, mask, mask.ne[0], mask.ne[1] * mask.ne[3]))
            self._mask = ops.reshape(self._arena, rows, mask.ne[0], self._n_rows, 1, mask.ne[3])
        return self._mask

    def fill(self, count: BoolArray) -> F32Array | BoolArray:
        """Write the inputs: (S, n) which rows count. Return what the rows that the graph looks at count."""
        if (most := int(count.sum(axis=1).max())) > self._n_rows:
            raise ParamError(f"chosen: {most} tokens of a stream, the graph observes n_rows={self._n_rows}")
        if self._weights is not None:
            self._weights.array[0, 0] = count
        if self._index is None:
            return count
        # those that count come first, others fill up where streams differ
        order = np.argsort(~count, axis=1, kind="stable")[:, : self._n_rows]
        self._index.array[0, 0, 0] = (order + self._n * np.arange(self._n_stream)[:, None]).reshape(-1)
        picked: BoolArray = np.take_along_axis(count, order, axis=1)
        return picked

    def _gathered(self, rows: Tensor) -> Tensor:
        if self._index is None:
            n = self._n_rows * self._n_stream
            self._index = GraphInput(self._arena.tensor(DType.I32, (n,), "observed_rows"))
        return ops.get_rows(self._arena, rows, self._index.tensor)
