"""Compute: turns a ubatch into logits. Holds the scheduler and the one graph that is allocated on it.

Source: spec decode.md sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
        budget = NODES_BESIDE + NODES_PER_LAYER * model.hparams.n_layer
        self._arena = Arena(budget, budget)
        self._sched = Sched(backends, budget, (*stands_on, *cache.owners, self._arena))
        self._built: BuiltGraph | None = None
        self.n_reused = 0

    def reserve(self, n_tokens: int, n_outputs: int, watch: MassWatch | None = None) -> None:
        """Allocate compute memory for the largest ubatch, observed by `watch`. Drops the graph at hand.

        Raises
        ------
        AllocError : the memory cannot be had.
        UnsupportedOpError : a node runs on none of the devices.
        """
        self._built = None
        n_stream = self._cache.n_stream
        n_tokens = -(-n_tokens // n_stream) * n_stream if n_stream > 1 else n_tokens
        purpose = f"n_ubatch={n_tokens} over {self._cache.n_cells} cells"
        for n, n_kv in self._largest(n_tokens):
            kv = KVShape(n, n_kv, 0, n_stream)
            seen = None if watch is None else watch.up_to(n // n_stream)
            built = self._build(GraphShape(kv, min(n_outputs, n), seen))
            built.graph.check_supported(self._sched.devices)
            self._sched.reserve(built.graph, purpose)
        # a host that overcommits grants memory which it lacks, and ends the process when that is written to
        host = self._sched.backends[-1]
        if self._sched.nbytes_on(host) > host.device.memory_free:
            raise AllocError(f"{purpose}: {self._sched.nbytes_on(host)} bytes of compute buffers are more than is free")

    def _largest(self, n_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the ubatches, and numbers of cells below them, that may need the most memory."""
        n_few, n_cells, fuse_from = ops.FUSED_MAX_ROWS * self._cache.n_stream, self._cache.n_cells, 0
        if self._attention.few is AttentionPath.FUSED and n_few < n_tokens:
            yield n_few, n_cells
        if self._attention.fuse_from is not None:
            fuse_from = self._attention.fuse_from
        if 1 < fuse_from <= n_cells:
            yield n_tokens, fuse_from - 1  # where prompts take another path still
        yield n_tokens, n_cells

    def lay_out_v(self, n_tokens: int) -> None:
        """Let V lie as generation at the present depth reads it best, before `n_tokens` more are stored.

        Prompts leave it in rows, where they write it fastest; the first token generated after them turns it.
        """
        cache = self._cache
        wanted = self._attention.wants_transposed(cache.used_max_p1 + n_tokens, cache.store.v_trans)
        if wanted == cache.store.v_trans or (wanted and n_tokens >= MANY_TOKENS) or not cache.store.can_turn_v:
            return
        cache.store_v(transposed=wanted)
        self._built = None

    def run(
        self, shape: KVShape, slot: SlotInfo, ubatch: UBatch, out: F32Array, watched: Watched | None = None
    ) -> Mapping[int, Tensor]:
        """Compute a ubatch whose bookkeeping has been applied; writes its logits into `out` (n_outputs, n_vocab).

        Returns
        -------
        The masses that `watched` asks for, see `KVGraph.masses`; they hold until the next ubatch.

        Raises
        ------
        ComputeCancelled, ComputeError, AllocError : the ubatch's rows in the cache are then undefined.
        """
        watch, chosen = (None, None) if watched is None else (watched.watch, watched.chosen)
        built = self._graph_for(GraphShape(shape, ubatch.n_outputs, watch))
        built.builder.fill(slot, ubatch, chosen)
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
