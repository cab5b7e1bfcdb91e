"""HybridMemory: layers that attend and layers with a state, or layers that do both, in one memory.

Follows llama.cpp's ``llama_memory_hybrid``. Source: spec iswa_recurrent_hybrid.md section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pykv.batch import UBatch, ValidBatch
from pykv.cells import CellsView, SlotInfo, clip_range
from pykv.ggml import Graph, GraphInput, Tensor
from pykv.memory import splits
from pykv.memory.attention import AttentionPlan
from pykv.memory.attention_choice import PathsInUse
from pykv.memory.attention_mass import MassWatch
from pykv.memory.base import MemoryContext
from pykv.memory.iswa import ISWACache
from pykv.memory.kv_cache import KVCache
from pykv.memory.memory_graph import AttentionGraph, MemoryGraph
from pykv.memory.parts import MemoryParts, Part, PartsContext, PartsShape
from pykv.memory.recurrent import RecurrentMemory
from pykv.memory.recurrent_context import RecurrentContext
from pykv.memory.recurrent_graph import RecurrentGraph
from pykv.memory.shift_support import ShiftSupport
from pykv.memory.spec import MemorySpec
from pykv.memory.state_part import StatePart
from pykv.memory.stored_kv import StoredKV
from pykv.memory.verb import read, step, verb
from pykv.typing import BoolArray, F32Array, I32Array, as_int


class HybridMemory(MemoryParts):
    """K and V of past tokens beside states that stand for them all.

    Attributes
    ----------
    attention : the layers with K and V.
    recurrent : the layers with a state.
    """

    def __init__(self, spec: MemorySpec, attention: KVCache | ISWACache, recurrent: RecurrentMemory) -> None:
        super().__init__(spec, (attention, recurrent), attention.guard)
        self.attention, self.recurrent = attention, recurrent

    @property
    def n_cells(self) -> int:
        """Tokens that one stream can hold."""
        return self.attention.n_cells

    @property
    def n_stream(self) -> int:
        return self.attention.n_stream

    @property
    def n_seq_max(self) -> int:
        """Sequences."""
        return self.attention.n_seq_max

    def paths(self, attention: AttentionPlan) -> dict[str, PathsInUse]:
        """Return how the next tokens are attended to, by kind of layer, named as in `visible`."""
        return self.attention.paths(attention)

    def full_shapes(self, n_tokens: int, attention: AttentionPlan) -> list[PartsShape]:
        """Return the shape of the largest graph over at least so many tokens, as many for each sequence."""
        return super().full_shapes(-(-n_tokens // self.n_seq_max) * self.n_seq_max, attention)

    # batches

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> HybridContext | None:
        """Split a batch into equal parts of its sequences, and find room for all of it in both parts.

        Raises
        ------
        BatchError, ContextLengthExceeded : as in `KVCache`, `ISWACache` and `RecurrentMemory.init_batch`.
        """
        self.attention.begin_batch(batch)
        self.recurrent.check_coupled(batch)
        n_rs_seq = self.recurrent.n_rs_seq
        ubatches = splits.equal(
            batch, n_ubatch, sequential=self.n_stream > 1, keep_tail=n_rs_seq + 1 if n_rs_seq else 0
        )
        if ubatches is None:
            return None
        kv = self.attention.prepare(ubatches)
        if kv is None:
            self.attention.check_share(batch)
            return None
        return HybridContext(self, kv, self.recurrent.prepare(ubatches))

    def graph(
        self, graph: Graph, shape: PartsShape, attention: AttentionPlan, watches: Sequence[MassWatch] = ()
    ) -> HybridGraph:
        """Return this memory's part of a graph."""
        kv, states = shape.parts
        return HybridGraph(
            self.attention.graph(graph, kv, attention, watches), self.recurrent.graph(graph, states, attention)
        )

    # sequences

    @verb
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all with -1; False, with nothing changed, if a state cannot go back.

        A sequence that loses its newest token then ends with the last of those whose K and V are left, in both parts.
        """
        # differs from llama.cpp: -1 is every sequence here too (there: refused, since states know no such thing)
        seqs = range(self.n_seq_max) if as_int(seq_id) == -1 else (seq_id,)
        undo, (first, end) = self.recurrent.bookmark(), clip_range(p0, p1)
        for s in seqs:
            cut = first <= self.recurrent.pos_max(s) < end
            if not step(self.recurrent.seq_rm)(s, self._end_below(s, first) if cut else p0, p1):
                undo()
                return False
        return step(self.attention.seq_rm)(seq_id, p0, p1)

    def _end_below(self, seq_id: int, p: int) -> int:
        """Return the position behind the last of a sequence's tokens below `p`, 0 without one."""
        # differs from llama.cpp: there a state goes back to p - 1, also where that token was copied or cut away
        pos = self.attention.seen(seq_id)[0]
        return int(pos[pos < p].max(initial=-1)) + 1

    @verb
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` become what `src` is at `p1`, in both parts or in none: its tokens from `p0` on, and its state.

        Raises
        ------
        NoSlotError : the stream of `dst` lacks cells; nothing has changed.
        ParamError : the state of `src` at `p1` is not kept; nothing has changed.
        """
        first, end = clip_range(p0, p1)
        last, _ = self.recurrent.pos_max(src), self.recurrent.pos_max(dst)
        if int(src) != int(dst) and first < end and first <= max(last, 0):
            self._all_or_none(lambda part: self._become(part, src, dst, p0, p1))

    def _become(self, part: Part, src: int, dst: int, p0: int, p1: int) -> None:
        if part is self.attention:
            # differs from llama.cpp: there what dst held stays beside what it gets, although its state is that of src
            step(part.seq_rm)(dst)
        step(part.seq_cp)(src, dst, p0, p1)

    @verb
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move the positions of a range by `delta`, in both parts or in none.

        A sequence whose last token falls below 0 is removed, since its state goes with that.

        Raises
        ------
        ShiftUnsupported : `attention` cannot; nothing has changed.
        """
        before = self.recurrent.cells().sequences
        self._all_or_none(lambda part: step(part.seq_add)(seq_id, p0, p1, delta))
        # differs from llama.cpp: there the state stays, at a negative position, and K and V of other tokens beside it
        left = self.recurrent.cells().sequences
        for gone in before if len(left) < len(before) else ():
            if gone not in left:  # with `reference_moves` also others that share the state
                step(self.attention.seq_rm)(gone)

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest position that both parts have, -1 if the sequence is empty: a state has only its last."""
        return max(part.pos_min(seq_id) for part in self.parts)

    def pos_max(self, seq_id: int) -> int:
        """Return the largest position that both parts hold, -1 if the sequence is empty."""
        return min(part.pos_max(seq_id) for part in self.parts)

    def can_shift(self) -> ShiftSupport:
        """Return whether positions can be moved, and if not, why. What was removed stays in the states."""
        return replace(self.attention.can_shift(), is_lossy=True)

    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """See `StateFiles.state_parts`. Of what is attended to, a partial state has only windows."""
        if partial and isinstance(self.attention, KVCache):
            return self.recurrent.state_parts(partial)
        return super().state_parts(partial)

    def cut_rest(self, seq_id: int) -> None:
        """See `StateFiles.cut_rest`."""
        # differs from llama.cpp: there K and V stay behind the state's end, and tokens that follow see them
        step(self.attention.seq_rm)(seq_id, self.recurrent.pos_max(seq_id) + 1, -1)

    # inspection

    def kv_of(self, il: int, slot: Any) -> tuple[StoredKV, SlotInfo]:
        """Return the cache that a layer reads, and its slot of a plan's."""
        return self.attention.kv_of(il, slot[0])

    def k(self, il: int, seq_id: int, derotate: bool = False) -> F32Array:
        """See `StoredKV.k`."""
        return self.attention.k(il, seq_id, derotate)

    def v(self, il: int, seq_id: int) -> F32Array:
        """See `StoredKV.v`."""
        return self.attention.v(il, seq_id)

    def r(self, il: int, seq_id: int) -> F32Array:
        """See `RecurrentMemory.r`."""
        return self.recurrent.r(il, seq_id)

    def s(self, il: int, seq_id: int) -> F32Array:
        """See `RecurrentMemory.s`."""
        return self.recurrent.s(il, seq_id)

    def cells(self, stream: int = 0) -> CellsView:
        """Return the cells of one stream of `attention`; those of the states are ``recurrent.cells()``."""
        return self.attention.cells(stream)

    def seen(self, seq_id: int, il: int | None = None) -> tuple[I32Array, I32Array]:
        """See `StoredKV.seen`."""
        return self.attention.seen(seq_id, il)

    def visible(self, seq_id: int, pos: int) -> dict[str, I32Array]:
        """Return the positions that a query at `pos` attends to, ascending, by kind of layer."""
        return self.attention.visible(seq_id, pos)

    @read
    def dump(self, stream: int = 0) -> str:
        """Return the cells of both parts; see `StoredKV.dump` and `RecurrentMemory.dump`."""
        return f"{step(self.attention.dump)(stream)}\nstates {step(self.recurrent.dump)()}"

    def ends_misfit(self) -> str | None:
        """Say whose state is that of a token behind the last one whose K and V are stored."""
        if self.attention.settings.reference_moves:  # a move goes by owners, and the parts share in different ways
            return None
        for seq_id in range(self.n_seq_max):
            state, last = self.recurrent.pos_max(seq_id), self.attention.pos_max(seq_id)
            if state > last:
                return f"sequence {seq_id}: its state ends at {state}, and what is attended to at {last}"
        return super().ends_misfit()


class HybridContext(PartsContext):
    """The plan for one batch in both parts."""

    def __init__(self, memory: HybridMemory, kv: MemoryContext, states: RecurrentContext) -> None:
        super().__init__((kv, states))
        self._memory, self._kv, self._states = memory, kv, states

    def retract(self, i: int, *, touched: bool = True) -> None:
        """Take ubatch `i`, applied last, out again.

        States that it has `touched` are lost, and with them their sequences: these are empty afterwards.
        """
        self._kv.retract(i, touched=touched)
        for seq_id in self._states.retract(i, touched=touched):
            step(self._memory.attention.seq_rm)(seq_id)


class HybridGraph(MemoryGraph):
    """Nodes and inputs of both parts in one graph."""

    def __init__(self, attention: MemoryGraph, states: RecurrentGraph) -> None:
        self._attention, self._states = attention, states

    @property
    def kv(self) -> AttentionGraph:
        """The part that stores K and V."""
        return self._attention.kv

    @property
    def states(self) -> RecurrentGraph:
        """The part that keeps states."""
        return self._states

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes, each once."""
        return self._attention.inputs + self._states.inputs

    @property
    def masses(self) -> tuple[Mapping[int, Tensor], ...]:
        """See `MemoryGraph.masses`."""
        return self._attention.masses

    def fill(self, slot: Any, ubatch: UBatch, chosen: Sequence[BoolArray] | None = None) -> None:
        """See `MemoryGraph.fill`; `slot` holds one slot for each part."""
        kv, states = slot
        self._attention.fill(kv, ubatch, chosen)
        self._states.fill(states, ubatch)
