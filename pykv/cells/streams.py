"""CellStreams: all bookkeeping of one KV cache, with the sequence verbs.

Holds no tensors: stored rows follow later, from `pending_copies` and `moved_rows`. Source: spec kv_cache.md
section 6; follows llama.cpp's ``llama_kv_cache``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pykv.cells.arguments import integer, sequence_id
from pykv.cells.kv_cells import KVCells
from pykv.cells.ranges import clip_range
from pykv.cells.row_copy import RowCopy
from pykv.cells.slot import find_cells
from pykv.cells.stream_table import StreamTable
from pykv.cells.window import NO_WINDOW
from pykv.errors import NoSlotError, ParamError, ShiftUnsupported
from pykv.typing import POS_INF, BoolArray, I32Array, I64Array, as_int


class CellStreams(StreamTable):
    """The cells of one KV cache and what can be done to sequences.

    Each verb refuses a sequence with SequenceError, another argument with ParamError, before it begins.
    """

    def clear(self) -> None:
        """Empty every stream and forget what is pending."""
        # differs from llama.cpp: queued copies go too, because what they would copy is gone
        self.n_changes += 1
        self.pending_copies.clear()
        for cells in self.cells:
            cells.reset()
        self.heads[:] = [0] * self.n_stream

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions ``[p0, p1)`` of a sequence, of all if ``seq_id == -1``. Returns True always."""
        p0, p1 = clip_range(p0, p1)
        if as_int(seq_id) == -1:
            self.n_changes += 1
            for stream, cells in enumerate(self.cells):
                idxs = cells.find(None, p0, p1)
                cells.rm(idxs)
                self._freed(stream, idxs)
            return True
        seq_id, stream = self._located(seq_id)
        idxs = self.cells[stream].find(seq_id, p0, p1)
        if idxs.size:
            self.n_changes += 1
            self._freed(stream, idxs[self.cells[stream].seq_rm(idxs, seq_id)])
        return True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` hold positions ``[p0, p1)`` of `src` too.

        In one stream the cells are shared. Across streams `dst` becomes in that range what `src` is: its own cells
        there are dropped, the bookkeeping is copied at once, and the rows are queued in `pending_copies`.

        Raises
        ------
        NoSlotError
            If the stream of `dst` lacks cells for the copy.
        """
        src, dst = sequence_id("src", src, self._n_ids), sequence_id("dst", dst, self._n_ids)
        p0, p1 = clip_range(p0, p1)
        s0, s1 = self.stream_of(src), self.stream_of(dst)
        self.n_changes += 1
        if s0 != s1:
            self._copy_across(src, dst, p0, p1)
        elif src != dst:
            cells = self.cells[s0]
            idxs = cells.find(src, p0, p1)
            cells.seq_add(idxs[~cells.member(dst)[idxs]], dst)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other sequence from the stream of this one."""
        seq_id, stream = self._located(seq_id)
        self.n_changes += 1
        idxs = self.cells[stream].find(None, 0, POS_INF)
        self._freed(stream, idxs[self.cells[stream].seq_keep(idxs, seq_id)])

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions ``[p0, p1)`` of a sequence by `delta`; those that fall below 0 are removed.

        Other sequences keep theirs: a shared cell is first copied for the one that moves.

        Raises
        ------
        ShiftUnsupported
            If there are not enough cells to copy shared ones.
        ParamError
            If `delta` is no such integer, or a position would pass the largest one.
        """
        seq_id, stream = self._located(seq_id)
        p0, p1 = clip_range(p0, p1)
        delta = integer("delta", delta, -POS_INF, POS_INF)
        if delta == 0 or p0 == p1:
            return
        self.n_changes += 1
        cells = self.cells[stream]
        idxs = cells.find(seq_id, p0, p1)
        pos = cells.pos[idxs]
        if idxs.size and (last := int(pos.max()) + delta) >= POS_INF:
            raise ParamError(f"delta = {delta}: position {last} would pass the limit {POS_INF - 1}")
        shared = self._shared(cells, idxs)
        if shared.any():
            falling = shared & (pos < -delta)
            own = self._split_off(seq_id, stream, idxs[shared & ~falling])
            cells.seq_rm(idxs[falling], seq_id)
            idxs = np.concatenate((idxs[~shared], own))
        freed = idxs[cells.pos_add(idxs, delta)]
        self.heads[stream] = int(freed.min()) if freed.size else 0

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions ``[p0, p1)`` of a sequence by `d` >= 1, rounding down.

        Other sequences keep theirs, as in `seq_add`.

        Raises
        ------
        ShiftUnsupported
            If there are not enough cells to copy shared ones.
        ParamError
            If `d` is not an integer from 1 to the largest position.
        """
        seq_id, stream = self._located(seq_id)
        p0, p1 = clip_range(p0, p1)
        d = integer("d", d, 1, POS_INF)
        if d == 1 or p0 == p1:
            return
        self.n_changes += 1
        cells = self.cells[stream]
        idxs = cells.find(seq_id, p0, p1)
        shared = self._shared(cells, idxs)
        if shared.any():
            pos = cells.pos[idxs]
            shared &= pos // d != pos  # what stays where it is stays shared
            own = self._split_off(seq_id, stream, idxs[shared])
            idxs = np.concatenate((idxs[~shared], own))
        cells.pos_div(idxs, d)

    # pending work

    @property
    def has_shift(self) -> bool:
        """Whether keys are to be moved before the next graph."""
        return any(cells.has_shift for cells in self.cells)

    def moved_rows(self) -> tuple[I64Array, I32Array]:
        """Return the rows whose keys have yet to follow their positions, ascending, and by how much.

        Row ``stream * n_cells + cell``; (k,) each.
        """
        found = [(s, np.flatnonzero(cells.shift)) for s, cells in enumerate(self.cells) if cells.has_shift]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        rows = [idxs + s * self.n_cells for s, idxs in found]
        return np.concatenate(rows), np.concatenate([self.cells[s].shift[idxs] for s, idxs in found])

    def reset_shift(self, rows: I64Array | None = None) -> None:
        """Forget pending shifts, of all rows or of some: their keys have been moved."""
        for s, cells in enumerate(self.cells):
            if rows is None:
                cells.reset_shift()
            else:
                cells.reset_shift(rows[rows // self.n_cells == s] % self.n_cells)

    # mechanism

    def _located(self, seq_id: int) -> tuple[int, int]:
        """Return a sequence as Python's int, and its stream."""
        stream = self.stream_of(seq_id)
        return int(seq_id), stream

    def _shared(self, cells: KVCells, idxs: I64Array) -> BoolArray:
        """Return (k,) which cells must be copied before one of their sequences moves."""
        if self._reference_moves:
            return np.zeros(idxs.size, np.bool_)
        # differs from llama.cpp: there a shared cell moves for all, because it has one position
        return np.asarray(cells.n_owners[idxs] > 1)

    def _split_off(self, seq_id: int, stream: int, idxs: I64Array) -> I64Array:
        """Give a sequence copies of cells in place of these; returns the cells of the copies."""
        if idxs.size == 0:
            return idxs
        cells = self.cells[stream]
        own = find_cells(cells, self.heads[stream], idxs.size, NO_WINDOW, cont=False)
        if own is None:
            others = [s for s in cells.sequences() if s != seq_id and cells.member(s)[idxs].any()]
            raise ShiftUnsupported(
                "shared_cells",
                f"sequence {seq_id} shares {idxs.size} cells with sequences {others}, and only "
                f"{cells.n - cells.n_used} cells are free to copy them to",
            )
        self._copy_cells(seq_id, RowCopy(stream, stream, idxs, own))
        cells.seq_rm(idxs, seq_id)
        return own

    def _copy_across(self, src: int, dst: int, p0: int, p1: int) -> None:
        # differs from llama.cpp: a range is what it says; there anything but the whole ends the process, and an end
        # of 0, or beyond the number of cells, counts as the whole
        source, target = self.cells[src], self.cells[dst]
        idxs, old = source.find(src, p0, p1), target.find(dst, p0, p1)
        room = target.n - target.n_used + old.size
        if idxs.size > room:
            raise NoSlotError(f"seq_cp: {idxs.size} cells of sequence {src}, and stream {dst} has room for {room}")
        self._freed(dst, old[target.seq_rm(old, dst)])
        if idxs.size == 0:
            return
        if target.n_used == 0:  # a twin, cell by cell
            target.reset()
            own, self.heads[dst] = idxs, self.heads[src]
        else:
            found = find_cells(target, self.heads[dst], idxs.size, NO_WINDOW, cont=False)
            assert found is not None, "room was counted"
            own = found
        self._copy_cells(dst, RowCopy(src, dst, idxs, own))

    def _copy_cells(self, seq_id: int, copy: RowCopy) -> None:
        """Fill cells like others, for one sequence, and queue the copying of their rows."""
        snap = self.cells[copy.src_stream].snapshot(copy.src)
        owners = {seq_id: np.ones(copy.src.size, np.bool_)}
        self.cells[copy.dst_stream].restore(copy.dst, replace(snap, owners=owners))
        self.pending_copies.append(copy)
