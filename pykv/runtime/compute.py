"""Compute: turns a ubatch into logits. Holds the scheduler and the one graph that is allocated on it.

Source: spec decode.md sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from pykv.batch import UBatch
from pykv.errors import AllocError
from pykv.ggml import Arena, Backend, Device, Graph, GraphInput, GraphOutput, MisplacedOp, Sched, Tensor, ops
from pykv.ggml.owner import Owner
from pykv.memory import AttentionPath, AttentionPlan, MassWatch, Memory
from pykv.memory.attention import MANY_TOKENS
from pykv.memory.memory_graph import MemoryShape
from pykv.models import Architecture, GraphBuilder, GraphShape
from pykv.runtime.observe import Watched
from pykv.typing import F32Array

NODES_PER_ROUTING, NODES_PER_EXPERT = 24, 2
"""What a layer takes beside `nodes_per_layer` to choose a token's experts, and to add up what each makes of it."""
NODES_PER_MASS = 32
"""Nodes of each layer for each watch."""
NODES_PER_TAP = 3
NODES_BESIDE = 64


class BuiltGraph:
    """A graph with memory, and the shape that it serves."""

    def __init__(self, graph: Graph, builder: GraphBuilder, logits: GraphOutput | None) -> None:
        self.graph, self.builder, self.logits = graph, builder, logits
        self.shape = builder.shape
        self.inputs: tuple[GraphInput, ...] = builder.inputs
        self.taps = {} if builder.taps is None else builder.taps.outputs


class Compute:
    """Runs a model over ubatches against one memory.

    Attributes
    ----------
    n_reused : ubatches that ran on the graph of the one before.
    is_tapped : whether graphs show what attention gives, see `tapped`.
    has_begun : whether the last `run` has come to compute, so that stored rows may have been written.

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
        self._backends, self._stands_on = backends, (*stands_on, *memory.owners)
        self._n_states = n_rs_seq * sum(layer.state is not None for layer in memory.spec.layers)
        self._arena, self._sched = self._room(0)
        self._built: BuiltGraph | None = None
        self.n_reused, self.has_begun, self.is_tapped = 0, False, False

    def reserve(
        self, n_tokens: int, n_outputs: int, watches: Sequence[MassWatch] = (), *, is_tapped: bool = False
    ) -> None:
        """Allocate compute memory for the largest ubatch, observed by `watches`. Drops the graph at hand.

        With `is_tapped`, also for graphs that show what attention gives.

        What was held before is given back first; after an error, nothing is held, unless it was clear before.

        Raises
        ------
        AllocError : the memory cannot be had.
        UnsupportedOpError : a node runs on none of the devices.
        """
        self._sched.check_successor(_n_nodes(self._model, self._n_states, len(watches)))
        self.close()  # a scheduler would keep what it has
        self._arena, self._sched = self._room(len(watches))
        purpose = f"n_ubatch={n_tokens} over {self._memory.n_cells} cells"
        for shape in self._largest(n_tokens, n_outputs, watches):
            built = self._build(replace(shape, is_tapped=is_tapped))
            built.graph.check_supported(self._sched.devices)
            self._sched.reserve(built.graph, purpose)
        # a host that overcommits grants memory which it lacks, and ends the process when that is written to
        host = self._sched.backends[-1]
        if self._sched.nbytes_on(host) > host.device.memory_free:
            raise AllocError(f"{purpose}: {self._sched.nbytes_on(host)} bytes of compute buffers are more than is free")

    def misplaced(self, n_tokens: int) -> list[MisplacedOp]:
        """Return the operations on stored tensors that run on another device than where those lie.

        Of single tokens and of `n_tokens`. Drops the graph at hand.
        """
        if len(self._backends) == 1:
            return []
        self._built = None
        found: dict[MisplacedOp, None] = {}
        for n in (self._memory.n_stream, n_tokens):
            for shape in self._largest(n, n, ()):
                found |= dict.fromkeys(self._sched.misplaced(self._build(shape).graph))
        return list(found)

    def reserve_nbytes(self, n_tokens: int, n_outputs: int) -> dict[Device, int]:
        """Return the bytes on each device that `reserve` would allocate. Allocates nothing, drops the graph at hand.

        Raises
        ------
        UnsupportedOpError : a node runs on none of the devices.
        """
        self._built = None
        most = [0] * len(self._backends)
        for shape in self._largest(n_tokens, n_outputs, ()):
            most = list(map(max, most, self._sched.reserve_nbytes(self._build(shape).graph)))
        return dict(zip(self._sched.devices, most, strict=True))

    def _largest(self, n_tokens: int, n_outputs: int, watches: Sequence[MassWatch]) -> Iterator[GraphShape]:
        """Yield the shapes of which one needs the most memory; a smaller one may, where it takes another path."""
        n_stream = self._memory.n_stream
        n_tokens = -(-n_tokens // n_stream) * n_stream
        sizes = {n_tokens}
        if self._attention.few is AttentionPath.FUSED:
            # few rows have partial sums of their own; masses of more are computed beside
            sizes |= {min(n_tokens, n * n_stream) for n in (ops.FUSED_MAX_ROWS, MANY_TOKENS - 1)}
        for n in sorted(sizes):
            # where some rows of logits are not wanted, there is an index of those that are
            outputs = {min(n_outputs, n), max(1, min(n_outputs, n - 1))} if n == n_tokens else {min(n_outputs, n - 1)}
            seen = {_seen(watches, n // n_stream, is_cut) for is_cut in (False, True)}
            for shape, n_out, seen_by in product(self._memory.full_shapes(n, self._attention), outputs, seen):
                yield GraphShape(shape, n_out, seen_by)

    def lay_out(self, n_tokens: int) -> None:
        """Let what is stored lie as generation at the present depth reads it best, before `n_tokens` more come."""
        if self._memory.lay_out(self._attention, n_tokens):
            self._built = None

    def run(
        self, shape: MemoryShape, slot: Any, ubatch: UBatch, out: F32Array, watched: Sequence[Watched] = ()
    ) -> tuple[Mapping[int, Tensor], ...]:
        """Compute a ubatch whose bookkeeping has been applied; writes its logits into `out` (n_outputs, n_vocab).

        Returns
        -------
        The masses that each of `watched` asks for, see `MemoryGraph.masses`; they hold until the next ubatch.

        Raises
        ------
        ComputeCancelled, ComputeError, AllocError : if it `has_begun`, the ubatch's rows in the memory are undefined.
        """
        self.has_begun = False
        watches = tuple(one.watch for one in watched)
        built = self._graph_for(GraphShape(shape, len(out), watches, ubatch.token is None, self.is_tapped))
        built.builder.fill(slot, ubatch, [one.chosen for one in watched])
        self.has_begun = True
        self._sched.compute(built.graph)
        if built.logits is not None:
            built.logits.read_into(out)
        return built.builder.memory.masses

    def tapped(self) -> dict[int, F32Array]:
        """Return what attention gave to the tokens of the ubatch computed last: layer → (n_tokens, n_embd) f32."""
        assert self._built is not None, "a ubatch was computed"
        found = {}
        for il, output in self._built.taps.items():
            found[il] = np.empty((output.tensor.ne[1], output.tensor.ne[0]), np.float32)
            output.read_into(found[il])
        return found

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
        budget = _n_nodes(self._model, self._n_states, n_watches)
        arena = Arena(budget, budget)
        try:
            return arena, Sched(self._backends, budget, (*self._stands_on, arena))
        except BaseException:
            arena.close()  # the error holds it otherwise, where memory is short already
            raise

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
        if built.logits is not None:
            built.logits.bind()
        for tap in built.taps.values():
            tap.bind()
        self._built = built
        return built

    def _build(self, shape: GraphShape) -> BuiltGraph:
        self._sched.reset()
        self._arena.reset()
        graph = Graph(self._arena)
        memory = self._memory.graph(graph, shape.memory, self._attention, shape.watches)
        builder = GraphBuilder(graph, self._memory.spec, shape, memory)
        logits = self._model.build(builder)
        if logits is None:
            return BuiltGraph(graph, builder, None)
        output = GraphOutput(logits)
        graph.expand(output.tensor)
        return BuiltGraph(graph, builder, output)


def _seen(watches: Sequence[MassWatch], n_rows: int, is_cut: bool) -> tuple[MassWatch, ...]:
    """Return what is observed of so many rows of a stream at most; with `is_cut`, of one less where some may not count.

    Weights of all rows may be there already, those of some are computed beside.
    """
    seen = tuple(watch.up_to(n_rows) for watch in watches)
    if not is_cut or n_rows == 1:
        return seen
    return tuple(replace(one, n_rows=n_rows - 1) if one.what.last and one.n_rows == n_rows else one for one in seen)


def _n_nodes(model: Architecture, n_states: int, n_watches: int) -> int:
    """Return the nodes of a graph, at most; all layers together keep `n_states` beside the latest."""
    hparams = model.hparams
    n_used = hparams.n_expert_used
    routed = NODES_PER_ROUTING + NODES_PER_EXPERT * n_used if n_used else 0
    per_layer = model.nodes_per_layer + routed + NODES_PER_MASS * n_watches + NODES_PER_TAP
    return NODES_BESIDE + per_layer * hparams.n_layer + model.nodes_per_snapshot * n_states
