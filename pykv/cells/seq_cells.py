"""The cells of one sequence: who they are, how many, between which cells, and from which position to which.

One row of flags and two cached ends stand for an ordered set of (position, cell): a step costs array writes
instead of tree updates, and a search looks only between the first and the last member. Follows llama.cpp's
``llama_kv_cells::seq_pos``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pykv.batch.arrays import ends
from pykv.typing import NO_POS, POS_INF, BoolArray, I32Array, I64Array

if TYPE_CHECKING:
    from pykv.cells.picked import Picked


def tokens_by_sequence(
    seq_ids: tuple[tuple[int, ...], ...],
) -> tuple[dict[int, slice | I64Array], int | I64Array]:
    """Return, per sequence, which tokens belong to it, and how many sequences each token has.

    Both are short where all tokens have the same sequences, as they nearly always do.
    """
    kinds = set(seq_ids)
    if len(kinds) == 1:
        return dict.fromkeys(seq_ids[0], slice(None)), len(seq_ids[0])
    groups: dict[int, slice | I64Array] = {}
    for s in sorted({s for ids in kinds for s in ids}):
        having = {ids for ids in kinds if s in ids}
        groups[s] = np.array([i for i, ids in enumerate(seq_ids) if ids in having])
    return groups, np.array([len(ids) for ids in seq_ids])


class SeqCells:
    """Membership of one sequence within one stream.

    Attributes
    ----------
    row : (n,) whether the cell belongs to the sequence.
    view : the same, read-only.
    count : number of cells that do.
    first, end : the first of them, and the last one + 1; both 0 without cells.
    offset : what every position exceeds its cell's index by, as after a prompt into an empty cache: then cells are
        found by arithmetic. None if that differs, may differ, or there are no cells.
    """

    __slots__ = ("_flags", "_hi", "_hi_stale", "_lo", "_lo_stale", "count", "end", "first", "offset", "row", "view")

    count: int
    first: int
    end: int
    offset: int | None

    def __init__(self, n: int) -> None:
        self._flags = bytearray(n)  # finds the next member with memchr: a pass over 250k cells takes 4 us
        self.row: BoolArray = np.frombuffer(self._flags, np.bool_)
        self.view: BoolArray = np.frombuffer(memoryview(self._flags).toreadonly(), np.bool_)
        self._emptied()

    def clear(self) -> None:
        """Forget every cell."""
        self.row[self.first : self.end] = False
        self._emptied()

    def add(self, cells: Picked, pos: I32Array) -> None:
        """Take in at least one cell, none a member yet; they hold `pos`."""
        offset = _common_offset(cells.idxs, pos)
        if self.count == 0:
            self.first, self.end, self.offset = cells.first, cells.last + 1, offset
            if offset is None:
                self._lo, self._hi = ends(pos)
        else:
            if offset is None or offset != self.offset:
                self._disorder()
                lo, hi = ends(pos)
                self._lo, self._hi = min(lo, self._lo), max(hi, self._hi)  # a stale end stays stale
            self.first, self.end = min(cells.first, self.first), max(cells.last + 1, self.end)
        self.row[cells.at] = True
        self.count += cells.n

    def drop(self, cells: Picked, pos: I32Array) -> None:
        """Let go of at least one member; they hold `pos`."""
        self.row[cells.at] = False
        self.count -= cells.n
        if self.count == 0:
            self._emptied()
            return
        self.first = self._flags.find(1, self.first)
        self.end = self._flags.rfind(1, 0, self.end) + 1
        if self.offset is None:
            lo, hi = ends(pos)
            self._lo_stale |= lo <= self._lo
            self._hi_stale |= hi >= self._hi

    def moved(self) -> None:
        """Note that positions of members have changed."""
        self._disorder()
        self._lo_stale = self._hi_stale = self.count > 0

    def owns_any(self, cells: Picked) -> bool:
        """Tell whether some of the cells are members."""
        is_near = cells.first < self.end and cells.last >= self.first
        return is_near and bool(np.count_nonzero(self.row[cells.at]))

    def find(self, pos: I32Array, p0: int, p1: int) -> I64Array:
        """Return the members with ``p0 <= pos < p1``, ascending. `pos` holds (n,) positions, here and below."""
        if self.offset is not None:
            start, stop = max(self.first, p0 - self.offset), min(self.end, p1 - self.offset)
            return self._members(start, stop) if start < stop else np.empty(0, np.int64)
        lo, hi = self.pos_min(pos), self.pos_max(pos)
        if p0 <= lo and p1 > hi:
            return self._members(self.first, self.end)
        if p0 > hi or p1 <= lo:
            return np.empty(0, np.int64)
        held, inside = pos[self.first : self.end], self.row[self.first : self.end]
        if p0 > lo:
            inside = inside & (held >= p0)
        if p1 <= hi:
            inside = inside & (held < p1)
        return inside.nonzero()[0] + self.first

    def pos_min(self, pos: I32Array) -> int:
        """Return the smallest position, -1 without cells."""
        if self.offset is not None:
            return self.first + self.offset
        if self._lo_stale:
            self._renew_ends(pos)
        return self._lo

    def pos_max(self, pos: I32Array) -> int:
        """Return the largest position, -1 without cells."""
        if self.offset is not None:
            return self.end - 1 + self.offset
        if self._hi_stale:
            self._renew_ends(pos)
        return self._hi

    def _renew_ends(self, pos: I32Array) -> None:
        """Renew stale ends. Where both were, positions may follow the cells again: all moved, or moved back."""
        held, row, both = pos[self.first : self.end], self.row[self.first : self.end], self._lo_stale and self._hi_stale
        if self._lo_stale:
            self._lo = int(np.where(row, held, POS_INF).min())
        if self._hi_stale:
            self._hi = int((held * row).max())
        self._lo_stale = self._hi_stale = False
        if both and self._hi - self._lo == self.end - 1 - self.first:
            members = self._members(self.first, self.end)
            self.offset = _common_offset(members, pos[members])

    def _members(self, start: int, stop: int) -> I64Array:
        """Return the members from cell `start` to `stop` - 1, ascending; both lie in the span."""
        if self.count == self.end - self.first:
            return np.arange(start, stop)
        return self.row[start:stop].nonzero()[0] + start

    def _disorder(self) -> None:
        """Go over to ends that are looked up."""
        if self.offset is not None:
            self._lo, self._hi = self.first + self.offset, self.end - 1 + self.offset
            self.offset = None

    def _emptied(self) -> None:
        self.count = self.first = self.end = 0
        self.offset = None
        self._lo = self._hi = NO_POS
        self._lo_stale = self._hi_stale = False


def _common_offset(idxs: I64Array, pos: I32Array) -> int | None:
    """Return what positions exceed their cells by; None if that differs."""
    offset: int = pos.item(0) - idxs.item(0)
    same = pos.size == 1 or np.count_nonzero(pos - idxs == offset) == pos.size
    return offset if same else None
