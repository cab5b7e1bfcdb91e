"""TwinCache: a KV cache and a second one that stores something else about the same tokens, in the same cells.

An indexer's keys are such a thing: they say which cells of the main cache are worth attending to, so token t must lie
in the same cell of both. Here both see one set of cells: there is one search, and nothing to keep in step.
Source: spec iswa_recurrent_hybrid.md sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pykv.batch import UBatch, ValidBatch
from pykv.cells import CellsView, SlotInfo
from pykv.errors import ParamError
from pykv.ggml import BufferType, Graph, GraphInput, Tensor
from pykv.memory.attention import AttentionPlan
from pykv.memory.attention_choice import PathsInUse
from pykv.memory.attention_mass import MassWatch
from pykv.memory.guard import Guard
from pykv.memory.kv_cache import KVCache
from pykv.memory.kv_context import KVContext
from pykv.memory.kv_graph import KVGraph
from pykv.memory.kv_settings import KVSettings, kv_type
from pykv.memory.memory_graph import MemoryGraph
from pykv.memory.parts import MemoryParts, PartsContext, PartsShape
from pykv.memory.shift_support import ShiftSupport
from pykv.memory.spec import MemorySpec
from pykv.memory.state_kv import KVState
from pykv.memory.state_part import StatePart
from pykv.memory.stored_kv import StoredKV
from pykv.memory.verb import step, verb
from pykv.typing import BoolArray, F32Array, I32Array


class TwinCache(MemoryParts):
    """Two caches over one set of cells.

    Attributes
    ----------
    main : what attention reads.
    index : what stands beside it.

    Parameters
    ----------
    spec, index_spec : the layers of both.
    settings : of `main`; `index` has the same cells, its types are `index_type`, and its tensors are called ``idx_``.
    place, n_threads, guard : as in `StoredKV`.
    """

    def __init__(
        self,
        spec: MemorySpec,
        index_spec: MemorySpec,
        settings: KVSettings,
        *,
        index_type: str = "f16",
        place: Callable[[int], BufferType] | None = None,
        n_threads: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        if index_spec.window != spec.window:
            raise ParamError(f"index_spec: window={index_spec.window} differs from the main cache's {spec.window}")
        by_channel = settings.v_by_channel_in_states and not kv_type(index_type, "index_type").is_quantized
        self.main = KVCache(spec, settings, place=place, n_threads=n_threads, guard=guard)
        own = replace(
            settings,
            type_k=index_type,
            type_v=index_type,
            v_trans=False,
            v_trans_in_states=by_channel,
            layers=None,
            tag="idx_",
        )
        try:
            self.index = KVCache(index_spec, own, place=place, other=self.main, n_threads=n_threads)
        except BaseException:
            self.main.close()
            raise
        super().__init__(spec, (self.main, self.index), self.main.guard)

    @property
    def n_cells(self) -> int:
        """Tokens that one stream can hold."""
        return self.main.n_cells

    @property
    def n_stream(self) -> int:
        return self.main.n_stream

    @property
    def n_seq_max(self) -> int:
        """Sequences."""
        return self.main.n_seq_max

    def paths(self, attention: AttentionPlan) -> dict[str, PathsInUse]:
        """Return how the next tokens are attended to, by kind of layer, named as in `visible`."""
        return self.main.paths(attention)

    # batches

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> PartsContext | None:
        """Split a batch and find cells for all of it, once for both caches. Errors as in `KVCache.init_batch`."""
        plan = self.main.init_batch(batch, n_ubatch)
        return None if plan is None else self._both(plan)

    def prepare(self, ubatches: Sequence[UBatch]) -> PartsContext | None:
        """Find cells for ubatches that are computed one after the other; None if they do not all fit."""
        plan = self.main.prepare(ubatches)
        return None if plan is None else self._both(plan)

    def graph(
        self, graph: Graph, shape: PartsShape, attention: AttentionPlan, watches: Sequence[MassWatch] = ()
    ) -> TwinGraph:
        """Return this memory's part of a graph."""
        main, index = shape.parts
        return TwinGraph(self.main.graph(graph, main, attention, watches), self.index.graph(graph, index, attention))

    # sequences

    @verb
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all sequences with -1. Always True."""
        return step(self.main.seq_rm)(seq_id, p0, p1)

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest position of a sequence, -1 if it is empty."""
        return self.main.pos_min(seq_id)

    def pos_max(self, seq_id: int) -> int:
        """Return the largest position of a sequence, -1 if it is empty."""
        return self.main.pos_max(seq_id)

    def can_shift(self) -> ShiftSupport:
        """Return whether positions can be moved, and if not, why."""
        lossy = self.main.can_shift().is_lossy or self.index.can_shift().is_lossy
        return replace(self.main.can_shift(), is_lossy=lossy)

    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """See `StateFiles.state_parts`. Both list the cells, which they have in common."""
        return (KVState(self.main), KVState(self.index))

    # inspection

    def kv_of(self, il: int, slot: tuple[SlotInfo, SlotInfo]) -> tuple[StoredKV, SlotInfo]:
        """Return the cache that a layer's attention reads, and its slot of a plan's."""
        return self.main, slot[0]

    def k(self, il: int, seq_id: int, derotate: bool = False) -> F32Array:
        """See `StoredKV.k`; the keys beside them are ``index.k()``."""
        return self.main.k(il, seq_id, derotate)

    def v(self, il: int, seq_id: int) -> F32Array:
        """See `StoredKV.v`."""
        return self.main.v(il, seq_id)

    def cells(self, stream: int = 0) -> CellsView:
        """Return the cells of one stream."""
        return self.main.cells(stream)

    def seen(self, seq_id: int, il: int | None = None) -> tuple[I32Array, I32Array]:
        """See `StoredKV.seen`."""
        return self.main.seen(seq_id, il)

    def visible(self, seq_id: int, pos: int) -> dict[str, I32Array]:
        """Return the positions that a query at `pos` attends to, ascending, by kind of layer."""
        return self.main.visible(seq_id, pos)

    def dump(self, stream: int = 0) -> str:
        """Return the cells up to the last used one; see `StoredKV.dump`."""
        return self.main.dump(stream)

    def _both(self, plan: KVContext) -> PartsContext:
        return PartsContext((plan, KVContext(self.index, plan.ubatches, plan.slots)))


class TwinGraph(MemoryGraph):
    """Nodes and inputs of both caches in one graph: `kv` is the main one's, `index` the other one's."""

    def __init__(self, main: KVGraph, index: KVGraph) -> None:
        self._main, self.index = main, index

    @property
    def kv(self) -> KVGraph:
        """The main cache's part."""
        return self._main

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes, each once."""
        return self._main.inputs + self.index.inputs

    @property
    def masses(self) -> tuple[Mapping[int, Tensor], ...]:
        """See `MemoryGraph.masses`."""
        return self._main.masses

    def fill(self, slot: Any, ubatch: UBatch, chosen: Sequence[BoolArray] | None = None) -> None:
        """See `MemoryGraph.fill`; `slot` holds one slot for each cache, the same."""
        self._main.fill(slot[0], ubatch, chosen)
        self.index.fill(slot[1], ubatch)
