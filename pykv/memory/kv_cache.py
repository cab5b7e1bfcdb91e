"""KVCache: attention memory for several sequences.

Never looks at a model: a `MemorySpec` says what the layers are. Follows llama.cpp's ``llama_kv_cache``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pykv.batch import UBatch, ValidBatch
from pykv.cells import SlotInfo, Undo
from pykv.cells.arguments import boolean, integer
from pykv.cells.ranges import clip_range
from pykv.errors import BatchError, ContextLengthExceeded, ShiftUnsupported
from pykv.ggml import BufferType, Graph
from pykv.memory import kv_snapshot, splits
from pykv.memory.attention import MANY_TOKENS, AttentionPlan
from pykv.memory.attention_choice import PathsInUse
from pykv.memory.attention_mass import MassWatch
from pykv.memory.kv_context import KVContext
from pykv.memory.kv_graph import KVGraph, KVShape
from pykv.memory.kv_plan import KVPlan
from pykv.memory.kv_settings import KVSettings
from pykv.memory.shift_support import ShiftSupport
from pykv.memory.snapshot import Piece, Snapshots
from pykv.memory.spec import MemorySpec
from pykv.memory.state_files import StateFiles
from pykv.memory.state_kv import KVState
from pykv.memory.state_part import StatePart
from pykv.memory.stored_kv import StoredKV
from pykv.memory.verb import verb
from pykv.typing import POS_INF, as_int


class KVCache(StoredKV, Snapshots, StateFiles):
    """K and V of past tokens: room for batches, and the verbs over sequences.

    A verb changes the bookkeeping at once and notes which stored rows have to follow. Where the cells are another
    cache's, it changes nothing and refuses the same arguments. Parameters and errors as in `StoredKV`.
    """

    @staticmethod
    def plan(spec: MemorySpec, settings: KVSettings, *, place: Callable[[int], BufferType] | None = None) -> KVPlan:
        """Return what a cache of these settings takes, without allocating it."""
        return KVPlan(spec, settings, place)

    # batches

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> KVContext | None:
        """Carry out what is queued, split a batch, and find cells for all of it. Takes no cells yet.

        Returns
        -------
        The plan, or None if there is no room for the whole batch.

        Raises
        ------
        BatchError : a token of several sequences, where each has a stream of its own.
        ContextLengthExceeded : a sequence brings more tokens than a stream has cells.
        """
        self.begin_batch(batch)
        is_unified = self.n_stream == 1
        ubatches = splits.simple(batch, n_ubatch) if is_unified else splits.equal(batch, n_ubatch, sequential=True)
        plan = None if ubatches is None else self.prepare(ubatches)
        if plan is None:
            self.check_share(batch)
        return plan

    def prepare(self, ubatches: Sequence[UBatch]) -> KVContext | None:
        """Find cells for ubatches that are computed one after the other; None if they do not all fit."""
        slots = self.streams.prepare(ubatches)
        return None if slots is None else KVContext(self, ubatches, slots)

    def begin_batch(self, batch: ValidBatch) -> None:
        """Carry out what is queued, and refuse a batch that no room would help; raises `BatchError`."""
        self.follow()
        if self.n_stream > 1 and batch.has_coupled:
            # differs from llama.cpp: not "no slot", because no smaller batch could help
            raise BatchError("seq_id: tokens of several sequences at once need kv_unified=True, shared cells")

    def check_share(self, batch: ValidBatch) -> None:
        """Refuse a sequence that could not be stored in an empty cache either; raises `ContextLengthExceeded`."""
        counts = np.bincount(batch.seq_first)
        longest = int(counts.argmax())
        if counts[longest] > self.n_cells:
            raise ContextLengthExceeded(
                f"sequence {longest} brings {counts[longest]} tokens; its share of the context is {self.n_cells} cells"
            )

    def bookmark(self) -> Undo:
        """Return what puts the bookkeeping back to what it is now."""
        undo_cells, moved, cells = self.streams.bookmark(), self._moved.copy(), self.streams.cells
        n_gone = [one.n_gone for one in cells]

        def undo() -> None:
            undo_cells()
            self._moved = moved
            for one, n in zip(cells, n_gone, strict=True):
                one.n_gone = n

        return undo

    def apply(self, slot: SlotInfo, ubatch: UBatch) -> None:
        """Write a ubatch's bookkeeping into its slot. A cache that shares its cells leaves them alone."""
        self.follow()
        if self.other is None:
            self.streams.apply(slot, ubatch)

    # graphs

    def full_shapes(self, n_tokens: int, attention: AttentionPlan) -> list[KVShape]:
        """Return shapes of which one has the largest graph over so many tokens, the same number in each stream."""
        n, fuse_from, depths = -(-n_tokens // self.n_stream), attention.fuse_from or 0, [self.n_cells]
        if n >= MANY_TOKENS and 1 < fuse_from <= self.n_cells:  # the most cells of the other path
            depths.insert(0, fuse_from - 1)
        return [KVShape(n * self.n_stream, n_kv, 0, self.n_stream) for n_kv in depths]

    def graph(
        self, graph: Graph, shape: KVShape, attention: AttentionPlan, watches: Sequence[MassWatch] = ()
    ) -> KVGraph:
        """Return this cache's part of a graph."""
        path = attention.path(shape.n_tokens // shape.n_stream, self.store.v_trans, shape.n_kv)
        return KVGraph(graph, self, shape, path, watches=watches)

    def lay_out(self, attention: AttentionPlan, n_tokens: int) -> bool:
        """Let V lie as generation at the present depth reads it best, before `n_tokens` more are stored.

        Prompts leave it in rows, where they write it fastest; the first token generated after them turns it.

        Returns
        -------
        Whether it was turned, so that graphs at hand read it wrongly.
        """
        wanted = self._wants_transposed(attention, n_tokens)
        if wanted == self.store.v_trans:
            return False
        self.lay_out_v(transposed=wanted)
        return True

    def paths(self, attention: AttentionPlan) -> dict[str, PathsInUse]:
        """Return how the next tokens are attended to, by kind of layer, named as in `visible`; empty without layers."""
        if not (self.store.plan.layers or self.store.plan.shared):
            return {}
        names = []
        for n in (1, MANY_TOKENS):
            n_kv = self.streams.n_kv_of(self.used_max_p1 + n)
            names.append(attention.path(n, self._wants_transposed(attention, n), n_kv).value)
        return {self.spec.window.kind: PathsInUse(*names)}

    def _wants_transposed(self, attention: AttentionPlan, n_tokens: int) -> bool:
        """Return how V shall lie for `n_tokens` more."""
        lies = self.store.v_trans
        wanted = attention.wants_transposed(self.used_max_p1 + n_tokens, lies)
        if wanted == lies or (wanted and n_tokens >= MANY_TOKENS) or not self.store.can_turn_v:
            return lies
        return wanted

    # sequences

    @verb
    def clear(self, data: bool = True) -> None:
        """Empty all cells and forget queued work; with `data`, also zero the buffers."""
        # differs from llama.cpp: a cache that shares another's cells does not reset them
        with_data = boolean("data", data)
        if self.other is None:
            self.streams.clear()
            self._moved.clear()
        if with_data:
            self.store.clear()

    @verb
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all sequences with -1. Always True."""
        if as_int(seq_id) != -1:
            self._check_ids(seq_id)
        if self.other is None:
            self.streams.seq_rm(seq_id, p0, p1)
            if self._moved:  # what is stored from now on was never moved
                self._moved = {s: at for s, at in self._moved.items() if self.streams.pos_max(s) >= 0}
        else:
            clip_range(p0, p1)
        return True

    @verb
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` hold a range of `src` too. In one stream, cells are shared. Across streams, `dst` becomes in that
        range what `src` is; the rows are copied at the next update.

        Raises
        ------
        NoSlotError : the stream of `dst` lacks cells.
        """
        self._check_ids(src, dst)
        if self.other is None:
            self.streams.seq_cp(src, dst, p0, p1)
            if self._moved.get(int(src), -1) > self._moved.get(int(dst), -1):
                self._moved[int(dst)] = self._moved[int(src)]
        else:
            clip_range(p0, p1)

    @verb
    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences from the stream of this one."""
        self._check_ids(seq_id)
        if self.other is None:
            self.streams.seq_keep(seq_id)

    @verb
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move the positions of a range by `delta`; what falls below 0 is removed.

        Cells shared with other sequences are copied first: those keep their positions, to the bit.

        Raises
        ------
        ShiftUnsupported : see `can_shift`; or shared cells, and too few free ones.
        """
        self._check_shift(seq_id)
        if self.other is None:
            self._moving(seq_id, lambda: self.streams.seq_add(seq_id, p0, p1, delta))
        else:
            clip_range(p0, p1)
            integer("delta", delta, -POS_INF, POS_INF)

    @verb
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of a range by `d`, rounding down. Shared cells and errors as in `seq_add`."""
        self._check_shift(seq_id)
        if self.other is None:
            self._moving(seq_id, lambda: self.streams.seq_div(seq_id, p0, p1, d))
        else:
            clip_range(p0, p1)
            integer("d", d, 1, POS_INF)

    def can_shift(self) -> ShiftSupport:
        """Return whether positions can be moved, and if not, why."""
        return replace(self.spec.can_shift, is_lossy=self.store.plan.type_k.is_quantized)

    # snapshots

    @property
    def snapshot_layout(self) -> object:
        """See `Snapshots.snapshot_layout`."""
        return kv_snapshot.layout(self)

    def take(self, seq_id: int, position: int, on: str) -> Piece:
        """See `Snapshots.take`. A cache that sees another's cells keeps nothing: the other one's snapshot has all."""
        return kv_snapshot.take(self, seq_id, position, on)

    def moved_at(self, seq_id: int) -> int:
        """Return `streams.n_changes` when positions of a sequence were last moved, -1 if they are as stored."""
        return self._moved.get(seq_id, -1)

    # states

    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """See `StateFiles.state_parts`. A cache that sees another's cells has none."""
        return (KVState(self),) if self.other is None else ()

    def note_loaded(self, seq_id: int) -> None:
        """Note that a sequence, or with -1 each, holds rows now of which no earlier snapshot knows."""
        loaded = range(self.n_seq_max) if seq_id == -1 else (seq_id,)
        self._moved.update(dict.fromkeys(loaded, self.streams.n_changes))

    # mechanism

    def _moving(self, seq_id: int, move: Callable[[], None]) -> None:
        before = self.streams.n_changes
        move()
        if self.streams.n_changes != before:
            moved = range(self.n_seq_max) if self.settings.reference_moves else (int(seq_id),)
            self._moved.update(dict.fromkeys(moved, self.streams.n_changes))

    def _check_shift(self, seq_id: int) -> None:
        self._check_ids(seq_id)
        support = self.can_shift()
        if support.reason is not None:
            raise ShiftUnsupported(support.reason, support.detail)
