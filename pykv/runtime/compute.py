"""Compute: turns a ubatch into logits. Holds the scheduler and the one graph that is allocated on it.

Source: spec decode.md sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pykv.batch import UBatch
from pykv.errors import AllocError
from pykv.ggml import Arena, Backend, Graph, GraphInput, Sched, Tensor, ops
from pykv.ggml.owner import Owner
from pykv.memory import AttentionPath, AttentionPlan, MassWatch, Memory
from pykv.memory.memory_graph import MemoryShape
from pykv.models import Architecture, GraphBuilder, GraphShape
from pykv.models.architecture import nodes_per_layer
from pykv.runtime.observe import Watched
from pykv.typing import F32Array

NODES_PER_ROUTING, NODES_PER_EXPERT = 24, 2
"""What a layer takes beside `nodes_per_layer` to choose a token's experts, and to add up what each makes of it."""
NODES_PER_SNAPSHOT = 2
"""What a layer with a state takes to keep one more beside the latest."""
NODES_BESIDE = 64


class BuiltGraph:
    """A graph with memory, and the shape that it serves."""

    def __init__(self, graph: Graph, builder: GraphBuilder, logits: Tensor | None) -> None:
        self.graph, self.builder, self.logits = graph, builder, logits
        self.shape = builder.shape
        self.inputs: tuple[GraphInput, ...] = builder.inputs


class Compute:
    """Runs a model over ubatches against one memory.

    Attributes
    ----------
    n_reused : ubatches that ran on the graph of the one before.

    Parameters
    ----------
    stands_on : what holds the weights.
    n_rs_seq : states that layers keep of each sequence beside the latest.
    """

    def __init__(
        self,
        model: Architecture,
        memory: Memory,
        attention: AttentionPlan,
        backends: list[Backend],
        stands_on: tuple[Owner, ...],
        n_rs_seq: int = 0,
    ) -> None:
        self._model, self._memory, self._attention = model, memory, attention
        budget = _n_nodes(model, n_rs_seq)
        self._arena = Arena(budget, budget)
        self._sched = Sched(backends, budget, (*stands_on, *memory.owners, self._arena))
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
        purpose = f"n_ubatch={n_tokens} over {self._memory.n_cells} cells"
        for n in self._largest(n_tokens):
            shape = self._memory.full_shape(n)
            seen = None if watch is None else watch.up_to(shape.n_tokens // self._memory.n_stream)
            built = self._build(GraphShape(shape, min(n_outputs, n), seen))
            built.graph.check_supported(self._sched.devices)
            self._sched.reserve(built.graph, purpose)
        # a host that overcommits grants memory which it lacks, and ends the process when that is written to
        host = self._sched.backends[-1]
        if self._sched.nbytes_on(host) > host.device.memory_free:
            raise AllocError(f"{purpose}: {self._sched.nbytes_on(host)} bytes of compute buffers are more than is free")

    def _largest(self, n_tokens: int) -> list[int]:
        """Return the sizes of ubatches that may need the most memory, ascending."""
        n_few = ops.FUSED_MAX_ROWS * self._memory.n_stream
        is_fused = self._attention.few is AttentionPath.FUSED
        return [n_few, n_tokens] if is_fused and n_few < n_tokens else [n_tokens]

    def lay_out(self, n_tokens: int) -> None:
        """Let what is stored lie as generation at the present depth reads it best, before `n_tokens` more come."""
        if self._memory.lay_out(self._attention, n_tokens):
            self._built = None

    def run(
        self, shape: MemoryShape, slot: Any, ubatch: UBatch, out: F32Array, watched: Watched | None = None
    ) -> Mapping[int, Tensor]:
        """Compute a ubatch whose bookkeeping has been applied; writes its logits into `out` (n_outputs, n_vocab).

        Returns
        -------
        The masses that `watched` asks for, see `MemoryGraph.masses`; they hold until the next ubatch.

        Raises
        ------
        ComputeCancelled, ComputeError, AllocError : the ubatch's rows in the cache are then undefined.
        """
        watch, chosen = (None, None) if watched is None else (watched.watch, watched.chosen)
        built = self._graph_for(GraphShape(shape, ubatch.n_outputs, watch, ubatch.token is None))
        built.builder.fill(slot, ubatch, chosen)
        self._sched.compute(built.graph)
        if built.logits is not None:
            built.logits.get_into(out)
        return built.builder.memory.masses

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
        memory = self._memory.graph(graph, shape.memory, self._attention, shape.watch)
        builder = GraphBuilder(graph, self._memory.spec, shape, memory)
        logits = self._model.build(builder)
        if logits is not None:
            graph.expand(logits.as_output())
        return BuiltGraph(graph, builder, logits)


def _n_nodes(model: Architecture, n_rs_seq: int) -> int:
    """Return the nodes of a graph, at most."""
    hparams = model.hparams
    n_used = hparams.n_expert_used
    routed = NODES_PER_ROUTING + NODES_PER_EXPERT * n_used if n_used else 0
    per_layer = nodes_per_layer(model) + routed + NODES_PER_SNAPSHOT * n_rs_seq
    return NODES_BESIDE + per_layer * hparams.n_layer
