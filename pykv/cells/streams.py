"""All bookkeeping of one KV cache: its streams of cells, where each search starts, and the sequence verbs.

Holds no tensors: stored rows follow later, from `shifts` and `pending_copies`. Source: spec kv_cache.md
sections 2 to 6; follows llama.cpp's ``llama_kv_cache``.

    unified            one stream for all sequences; forks share cells
    not unified        one stream per sequence, ``stream_of(s) == s``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pykv.batch.ubatch import UBatch
from pykv.cells.arguments import integer, sequence_id
from pykv.cells.cell_table import NO_TOKEN
from pykv.cells.kv_cells import KVCells
from pykv.cells.placing import Journal, Part, check_positions, check_writable, place
from pykv.cells.ranges import clip_range
from pykv.cells.slot import SlotInfo, find_slot
from pykv.cells.window import NO_WINDOW, Window
from pykv.errors import ParamError, ShiftUnsupported
from pykv.typing import MAX_SEQ, NO_POS, POS_INF, I32Array, I64Array, as_int


class CellStreams:
    """The cells of one KV cache.

    Attributes
    ----------
    cells : bookkeeping of each stream.
    heads : per stream, the cell where the next search starts; `n_cells` means past the last one.
    pending_copies : (source, destination) streams whose rows are still to be copied, in order.
    n_cells : cells of one stream.
    n_seq_max : sequences with a stream of their own, if not unified.
    window : the cells it hides from every later token may be reused.

    Parameters
    ----------
    n_pos_per_embd : positions per token; sequences with more than 1 cannot be shifted.
    reference_div_sign : see `KVCells`.
    """

    def __init__(
        self,
        n_cells: int,
        *,
        n_seq_max: int = 1,
        unified: bool = True,
        window: Window = NO_WINDOW,
        n_pos_per_embd: int = 1,
        reference_div_sign: bool = False,
    ) -> None:
        if not 1 <= n_seq_max <= MAX_SEQ:
            raise ParamError(f"n_seq_max = {n_seq_max}: must be 1 to {MAX_SEQ}")
        n_stream = 1 if unified else n_seq_max
        self.cells = tuple(KVCells(n_cells, reference_div_sign=reference_div_sign) for _ in range(n_stream))
        self.heads = [0] * n_stream
        self.pending_copies: list[tuple[int, int]] = []
        self.n_cells = n_cells
        self.n_seq_max = n_seq_max
        self.window = window
        self._n_ids = MAX_SEQ if n_stream == 1 else n_stream
        self._n_pos_per_embd = n_pos_per_embd

    @property
    def n_stream(self) -> int:
        return len(self.cells)

    def stream_of(self, seq_id: int) -> int:
        """Return the stream that holds a sequence.

        Raises
        ------
        SequenceError
            If there is no such sequence.
        """
        if type(seq_id) is not int or not 0 <= seq_id < self._n_ids:  # spares the decode path a call
            seq_id = sequence_id("seq_id", seq_id, self._n_ids)
        return 0 if len(self.cells) == 1 else seq_id

    # slots

    def find_slot(self, ubatch: UBatch, cont: bool = False) -> SlotInfo | None:
        """Find cells for a ubatch; None if they do not fit. Does not modify the cells."""
        return find_slot(self, ubatch, cont)

    def apply(self, slot: SlotInfo, ubatch: UBatch, ext_always: bool = False, embd_tok: int = NO_TOKEN) -> None:
        """Store a ubatch's bookkeeping in its slot and move the heads behind it.

        Parameters
        ----------
        slot, ubatch
            What a search found, and for what.
        ext_always
            Record column, row and token for embeddings too (models with n-gram embeddings).
        embd_tok
            The token that is recorded for embeddings.

        Raises
        ------
        ParamError
            If the slot does not fit; nothing has changed then.
        """
        self._apply(slot, ubatch, ext_always, embd_tok)

    def retract(self, slot: SlotInfo) -> None:
        """Empty the cells of a slot that was applied, because their rows could not be computed."""
        for stream, idxs in zip(slot.streams, slot.idxs, strict=True):
            self.cells[stream].rm(idxs)
            self._freed(stream, np.sort(idxs))

    def prepare(self, ubatches: Sequence[UBatch]) -> list[SlotInfo] | None:
        """Find slots for ubatches that will be applied one after the other; None if they do not all fit.

        Leaves everything as it was, also the heads and cells that a later ubatch would purge.
        """
        # differs from llama.cpp: purged cells and all heads come back, because refusal must leave no trace
        slots: list[SlotInfo] = []
        heads, journal = self.heads.copy(), Journal()
        try:
            for i, ubatch in enumerate(ubatches):
                slot = self.find_slot(ubatch)
                if slot is None:
                    return None
                slots.append(slot)
                if i + 1 < len(ubatches):  # nobody looks behind the last one
                    self._apply(slot, ubatch, journal=journal)
            return slots
        finally:
            journal.undo()
            self.heads[:] = heads

    def n_kv(self, slot: SlotInfo, n_pad: int = 1) -> int:
        """Return how many cells a graph must look at: all used ones of the slot's streams, rounded up."""
        pad = max(n_pad, 256)
        used = max(self.cells[s].used_max_p1 for s in slot.streams)
        return min(self.n_cells, max(pad, -(-used // pad) * pad))

    def full_slot(self) -> SlotInfo:
        """Return a slot over all streams, for sizing graphs at their largest; its cells mean nothing."""
        ids = tuple(range(self.n_stream))
        return SlotInfo(0, ids[-1], ids, np.zeros((len(ids), 1), np.int64))

    # sequences: each verb refuses a sequence with SequenceError, another argument with ParamError, before it begins

    def clear(self) -> None:
        """Empty every stream. Pending copies stay queued."""
        for cells in self.cells:
            cells.reset()
        self.heads[:] = [0] * self.n_stream

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions ``[p0, p1)`` of a sequence, of all if ``seq_id == -1``. Returns True always."""
        p0, p1 = clip_range(p0, p1)
        if as_int(seq_id) == -1:
            for stream, cells in enumerate(self.cells):
                idxs = cells.find(None, p0, p1)
                cells.rm(idxs)
                self._freed(stream, idxs)
            return True
        seq_id, stream = self._located(seq_id)
        idxs = self.cells[stream].find(seq_id, p0, p1)
        if idxs.size:
            self._freed(stream, idxs[self.cells[stream].seq_rm(idxs, seq_id)])
        return True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` own positions ``[p0, p1)`` of `src` too.

        In one stream the cells are shared. Across streams `dst` becomes a copy of `src`: its own cells are
        dropped, the bookkeeping is copied at once, and the rows are queued in `pending_copies`.

        Raises
        ------
        ParamError
            For a part of a sequence across streams.
        """
        src, dst = sequence_id("src", src, self._n_ids), sequence_id("dst", dst, self._n_ids)
        p0, p1 = integer("p0", p0), integer("p1", p1)
        s0, s1 = self.stream_of(src), self.stream_of(dst)
        if s0 != s1:
            self._copy_stream(src, dst, p0, p1)
        elif src != dst:
            cells = self.cells[s0]
            idxs = cells.find(src, *clip_range(p0, p1))
            cells.seq_add(idxs[~cells.member(dst)[idxs]], dst)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other sequence from the stream of this one."""
        seq_id, stream = self._located(seq_id)
        idxs = self.cells[stream].find(None, 0, POS_INF)
        self._freed(stream, idxs[self.cells[stream].seq_keep(idxs, seq_id)])

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions ``[p0, p1)`` of a sequence by `delta`; those that fall below 0 are removed.

        Cells shared with other sequences move for them too.

        Raises
        ------
        ShiftUnsupported
            If tokens have several positions.
        ParamError
            If `delta` is no such integer, or a position would pass the largest one.
        """
        seq_id, stream = self._shiftable(seq_id)
        p0, p1 = clip_range(p0, p1)
        delta = integer("delta", delta, -POS_INF, POS_INF)
        if delta == 0 or p0 == p1:
            return
        idxs = self.cells[stream].find(seq_id, p0, p1)
        freed = idxs[self.cells[stream].pos_add(idxs, delta)]
        self.heads[stream] = int(freed[0]) if freed.size else 0

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions ``[p0, p1)`` of a sequence by `d` >= 1, rounding down.

        Raises
        ------
        ShiftUnsupported
            If tokens have several positions.
        ParamError
            If `d` is not an integer from 1 to the largest position.
        """
        seq_id, stream = self._shiftable(seq_id)
        p0, p1 = clip_range(p0, p1)
        d = integer("d", d, 1, POS_INF)
        if d != 1 and p0 != p1:
            self.cells[stream].pos_div(self.cells[stream].find(seq_id, p0, p1), d)

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest position of a sequence, -1 if it is empty."""
        return self.cells[self.stream_of(seq_id)].pos_min(int(seq_id))

    def pos_max(self, seq_id: int) -> int:
        """Return the largest position of a sequence, -1 if it is empty."""
        return self.cells[self.stream_of(seq_id)].pos_max(int(seq_id))

    # pending work

    @property
    def has_shift(self) -> bool:
        """Whether keys are to be moved before the next graph."""
        return any(cells.has_shift for cells in self.cells)

    def shifts(self) -> I32Array:
        """Return (n_stream * n_cells,) position delta of each cell, stream after stream."""
        return np.concatenate([cells.shift for cells in self.cells])

    def reset_shift(self) -> None:
        """Forget pending shifts: the keys have been moved."""
        for cells in self.cells:
            cells.reset_shift()

    def drop_useless_copies(self) -> None:
        """Forget queued copies into streams that have been emptied since."""
        self.pending_copies[:] = [(src, dst) for src, dst in self.pending_copies if self.cells[dst].n_used]

    # inspection

    def check(self) -> None:
        """Verify every invariant from scratch; raises AssertionError."""
        for stream, cells in enumerate(self.cells):
            cells.check()
            head = self.heads[stream]
            assert 0 <= head <= self.n_cells, f"stream {stream}: head {head} is outside 0 to {self.n_cells}"
            strangers = [s for s in cells.sequences() if self.stream_of(s) != stream]
            assert not strangers, f"stream {stream} holds sequences {strangers} of other streams"

    def dump(self, stream: int = 0) -> str:
        """Return all cells of a stream: ``2:5{0,1}`` is position 5 of sequences 0 and 1, ``3:.`` is empty."""
        cells = self.cells[stream]
        return " ".join(
            f"{i}:." if p == NO_POS else f"{i}:{p}{{{','.join(map(str, cells.owners(i)))}}}"
            for i, p in enumerate(cells.pos.tolist())
        )

    # mechanism

    def _apply(
        self,
        slot: SlotInfo,
        ubatch: UBatch,
        ext_always: bool = False,
        embd_tok: int = NO_TOKEN,
        journal: Journal | None = None,
    ) -> None:
        n_streams, n = slot.idxs.shape
        if slot.n_tokens != ubatch.n_tokens or n_streams != len(slot.streams):
            raise ParamError(f"slot: has cells for {slot.n_tokens} tokens, the ubatch has {ubatch.n_tokens}")
        check_positions(ubatch)
        for s in ubatch.seq_id_unq:
            self.stream_of(s)
        for stream, idxs in zip(slot.streams, slot.idxs, strict=True):
            check_writable(self.cells[stream], idxs)
        with_ext = ext_always or ubatch.is_pos_2d or ubatch.token is not None
        part = Part(ubatch, slice(0, n), with_ext, embd_tok)
        for k, stream in enumerate(slot.streams):
            if k:
                part = replace(part, tokens=slice(k * n, (k + 1) * n))
            place(self.cells[stream], slot.idxs[k], part, journal)
            self.heads[stream] = int(slot.idxs[k, -1]) + 1

    def _freed(self, stream: int, idxs: I64Array) -> None:
        """Let the next search start at the first of the cells that became empty."""
        if idxs.size:
            self.heads[stream] = min(self.heads[stream], int(idxs[0]))

    def _located(self, seq_id: int) -> tuple[int, int]:
        """Return a sequence as Python's int, and its stream."""
        stream = self.stream_of(seq_id)
        return int(seq_id), stream

    def _shiftable(self, seq_id: int) -> tuple[int, int]:
        located = self._located(seq_id)
        if self._n_pos_per_embd > 1:
            raise ShiftUnsupported(f"each token has {self._n_pos_per_embd} positions")
        return located

    def _copy_stream(self, src: int, dst: int, p0: int, p1: int) -> None:
        n = self.n_cells
        if 0 < p0 < n - 1 or 0 < p1 < n - 1:
            raise ParamError(f"p0 = {p0}, p1 = {p1}: only a whole sequence can be copied across streams")
        cells = self.cells[src]
        idxs = cells.find(src, 0, POS_INF)
        snap = cells.snapshot(idxs)
        self.cells[dst].reset()
        self.cells[dst].restore(idxs, replace(snap, owners={dst: np.ones(idxs.size, np.bool_)}))
        self.heads[dst] = self.heads[src]
        self.pending_copies.append((src, dst))
