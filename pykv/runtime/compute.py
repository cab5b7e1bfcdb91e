"""Compute: turns a ubatch into logits. Holds the scheduler and the one graph that is allocated on it.

Source: spec decode.md sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from pykv.batch import UBatch
from pykv.cells import SlotInfo
from pykv.errors import AllocError
from pykv.ggml import Arena, Backend, Graph, GraphInput, Sched, Tensor, ops
from pykv.ggml.owner import Owner
from pykv.memory import AttentionPlan, KVCache, KVShape, MassWatch
from pykv.memory.attention import MANY_TOKENS, AttentionPath
from pykv.models import GraphBuilder, GraphShape
from pykv.models.llama import Llama
from pykv.runtime.observe import Watched
from pykv.typing import F32Array

NODES_PER_LAYER = 88
NODES_PER_MASS = 32
"""Nodes of each layer for each watch."""
NODES_BESIDE = 64


class BuiltGraph:
    """A graph with memory, and the shape that it serves."""

    def __init__(self, graph: Graph, builder: GraphBuilder, logits: Tensor | None) -> None:
        self.graph, self.builder, self.logits = graph, builder, logits
        self.shape = builder.shape
        self.inputs: tuple[GraphInput, ...] = builder.inputs


class Compute:
    """Runs a model over ubatches against one KV cache.

    Attributes
    ----------
    n_reused : ubatches that ran on the graph of the one before.
    """

    def __init__(
        self,
        model: Llama,
        cache: KVCache,
        attention: AttentionPlan,
        backends: list[Backend],
        stands_on: tuple[Owner, ...],
    ) -> None:
        self._model, self._cache, self._attention = model, cache, attention
        self._backends, self._stands_on = backends, (*stands_on, *cache.owners)
        self._arena, self._sched = self._room(0)
        self._built: BuiltGraph | None = None
        self.n_reused = 0

    def reserve(self, n_tokens: int, n_outputs: int, watches: Sequence[MassWatch] = ()) -> None:
        """Allocate compute memory for the largest ubatch, observed by `watches`. Drops the graph at hand.

        What was held before is given back first; after an error, nothing is held.

        Raises
        ------
        AllocError : the memory cannot be had.
        UnsupportedOpError : a node runs on none of the devices.
        """
        self.close()  # a scheduler would keep what it has
        self._arena, self._sched = self._room(len(watches))
        n_stream = self._cache.n_stream
        n_tokens = -(-n_tokens // n_stream) * n_stream if n_stream > 1 else n_tokens
        purpose = f"n_ubatch={n_tokens} over {self._cache.n_cells} cells"
        for shape in self._largest(n_tokens, n_outputs, watches):
            built = self._build(shape)
            built.graph.check_supported(self._sched.devices)
            self._sched.reserve(built.graph, purpose)
        # a host that overcommits grants memory which it lacks, and ends the process when that is written to
        host = self._sched.backends[-1]
        if self._sched.nbytes_on(host) > host.device.memory_free:
            raise AllocError(f"{purpose}: {self._sched.nbytes_on(host)} bytes of compute buffers are more than is free")

    def _largest(self, n_tokens: int, n_outputs: int, watches: Sequence[MassWatch]) -> Iterator[GraphShape]:
        """Yield the shapes of which one needs the most memory; a smaller one may, where it takes another path."""
        n_stream = self._cache.n_stream
        sizes = {n_tokens}
        if self._attention.few is AttentionPath.FUSED:
            # few rows have partial sums of their own; masses of more are computed beside
            sizes |= {min(n_tokens, n * n_stream) for n in (ops.FUSED_MAX_ROWS, MANY_TOKENS - 1)}
        for n in sorted(sizes):
            # where some rows of logits are not wanted, there is an index of those that are
            outputs = {min(n_outputs, n), max(1, min(n_outputs, n - 1))} if n == n_tokens else {min(n_outputs, n - 1)}
            seen = {_seen(watches, n // n_stream, is_cut) for is_cut in (False, True)}
            for n_kv, n_out, seen_by in product(self._deepest(n // n_stream), outputs, seen):
                yield GraphShape(KVShape(n, n_kv, 0, n_stream), n_out, seen_by)

    def _deepest(self, n_tokens: int) -> tuple[int, ...]:
        """Return the most cells that so many tokens of a stream meet, by each path that they take."""
        n_cells, fuse_from = self._cache.n_cells, self._attention.fuse_from or 0
        if n_tokens >= MANY_TOKENS and 1 < fuse_from <= n_cells:
            return fuse_from - 1, n_cells
        return (n_cells,)

    def lay_out_v(self, n_tokens: int) -> None:
        """Let V lie as generation at the present depth reads it best, before `n_tokens` more are stored.

        Prompts leave it in rows, where they write it fastest; the first token generated after them turns it.
        """
        cache = self._cache
        wanted = self._attention.wants_transposed(cache.used_max_p1 + n_tokens, cache.store.v_trans)
        if wanted == cache.store.v_trans or (wanted and n_tokens >= MANY_TOKENS) or not cache.store.can_turn_v:
            return
        cache.lay_out_v(transposed=wanted)
        self._built = None

    def run(
        self, shape: KVShape, slot: SlotInfo, ubatch: UBatch, out: F32Array, watched: Sequence[Watched] = ()
    ) -> tuple[Mapping[int, Tensor], ...]:
        """Compute a ubatch whose bookkeeping has been applied; writes its logits into `out` (n_outputs, n_vocab).

        Returns
        -------
        The masses that each of `watched` asks for, see `KVGraph.masses`; they hold until the next ubatch.

        Raises
        ------
        ComputeCancelled, ComputeError, AllocError : the ubatch's rows in the cache are then undefined.
        """
        built = self._graph_for(GraphShape(shape, ubatch.n_outputs, tuple(one.watch for one in watched)))
        built.builder.fill(slot, ubatch, [one.chosen for one in watched])
        self._sched.compute(built.graph)
        if built.logits is not None:
            built.logits.get_into(out)
        return built.builder.kv.masses

    def close(self) -> None:
        self._built = None
        self._sched.close()
        self._arena.close()

    @property
    def nbytes(self) -> int:
        """Compute memory in bytes."""
        return self._sched.nbytes

    def _room(self, n_watches: int) -> tuple[Arena, Sched]:
        """Return what holds a graph that is observed by so many watches, and a scheduler without compute memory."""
        budget = NODES_BESIDE + (NODES_PER_LAYER + NODES_PER_MASS * n_watches) * self._model.hparams.n_layer
        arena = Arena(budget, budget)
        return arena, Sched(self._backends, budget, (*self._stands_on, arena))

    def drop_graph(self) -> None:
        """Forget the graph at hand, so that the next ubatch builds its own."""
        self._built = None

    def _graph_for(self, shape: GraphShape) -> BuiltGraph:
        if self._built is not None and self._built.shape == shape:
            self.n_reused += 1
            return self._built
        self._built = None
        built = self._build(shape)
        self._sched.allocate(built.graph)
        for one in built.inputs:
            one.bind()
        self._built = built
        return built

    def _build(self, shape: GraphShape) -> BuiltGraph:
        self._sched.reset()
        self._arena.reset()
        graph = Graph(self._arena)
        n = shape.kv.n_tokens // shape.kv.n_stream
        path = self._attention.path(n, self._cache.store.v_trans, shape.kv.n_kv)
        builder = GraphBuilder(graph, self._cache, shape, path)
        logits = self._model.build(builder)
        if logits is not None:
            graph.expand(logits.as_output())
        return BuiltGraph(graph, builder, logits)


def _seen(watches: Sequence[MassWatch], n_rows: int, is_cut: bool) -> tuple[MassWatch, ...]:
    """Return what is observed of so many rows of a stream at most; with `is_cut`, of one less where some may not count.

    Weights of all rows may be there already, those of some are computed beside.
    """
    seen = tuple(watch.up_to(n_rows) for watch in watches)
    if not is_cut or n_rows == 1:
        return seen
    return tuple(replace(one, n_rows=n_rows - 1) if one.what.last and one.n_rows == n_rows else one for one in seen)
