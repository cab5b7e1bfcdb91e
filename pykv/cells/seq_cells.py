"""The cells of one sequence: who they are, how many, between which cells, and from which position to which.

One row of flags and two cached ends stand for an ordered set of (position, cell): a step costs array writes
instead of tree updates, and a search looks only between the first and the last member. Follows llama.cpp's
``llama_kv_cells::seq_pos``.
"""

from __future__ import annotations

import numpy as np

from pykv.typing import NO_POS, POS_INF, BoolArray, I32Array, I64Array


def ends(values: I32Array | I64Array) -> tuple[int, int]:
    """Return the smallest and the largest of at least one value."""
    if values.size == 1:  # the decode path: a reduction costs ten times an item
        only = int(values[0])
        return only, only
    return int(values.min()), int(values.max())


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
    """

    __slots__ = ("_flags", "_hi", "_hi_stale", "_lo", "_lo_stale", "count", "end", "first", "row", "view")

    count: int
    first: int
    end: int

    def __init__(self, n: int) -> None:
        self._flags = bytearray(n)  # finds the next member with memchr: a pass over 250k cells takes 4 us
        self.row: BoolArray = np.frombuffer(self._flags, np.bool_)
        self.view = self.row.view()
        self.view.flags.writeable = False
        self._emptied()

    def clear(self) -> None:
        """Forget every cell."""
        self.row[self.first : self.end] = False
        self._emptied()

    def add(self, idxs: I64Array, pos: I32Array) -> None:
        """Take in cells that hold `pos` and are not members yet."""
        (first, last), (lo, hi) = ends(idxs), ends(pos)
        if self.count == 0:
            self.first, self.end, self._lo, self._hi = first, last + 1, lo, hi
        else:  # a stale end stays stale
            self.first, self.end = min(first, self.first), max(last + 1, self.end)
            self._lo, self._hi = min(lo, self._lo), max(hi, self._hi)
        self.row[idxs] = True
        self.count += idxs.size

    def drop(self, idxs: I64Array, pos: I32Array) -> None:
        """Let go of members that hold `pos`."""
        self.row[idxs] = False
        self.count -= idxs.size
        if self.count == 0:
            self._emptied()
            return
        self.first = self._flags.find(1, self.first)
        self.end = self._flags.rfind(1, 0, self.end) + 1
        lo, hi = ends(pos)
        self._lo_stale |= lo <= self._lo
        self._hi_stale |= hi >= self._hi

    def moved(self) -> None:
        """Note that positions of members have changed."""
        self._lo_stale = self._hi_stale = self.count > 0

    def find(self, pos: I32Array, p0: int, p1: int) -> I64Array:
        """Return the members with ``p0 <= pos < p1``, ascending. `pos` holds (n,) positions, here and below."""
        lo, hi = self.pos_min(pos), self.pos_max(pos)
        if p0 > hi or p1 <= lo:
            return np.empty(0, np.int64)
        held = pos[self.first : self.end]
        inside = None if self.is_run else self.row[self.first : self.end]
        if p0 > lo:
            inside = _both(inside, held >= p0)
        if p1 <= hi:
            inside = _both(inside, held < p1)
        return np.arange(self.first, self.end) if inside is None else np.flatnonzero(inside) + self.first

    def pos_min(self, pos: I32Array) -> int:
        """Return the smallest position, -1 without cells."""
        if self._lo_stale:
            held, row = pos[self.first : self.end], self.row[self.first : self.end]
            self._lo = int(held.min() if self.is_run else np.where(row, held, POS_INF).min())
            self._lo_stale = False
        return self._lo

    def pos_max(self, pos: I32Array) -> int:
        """Return the largest position, -1 without cells."""
        if self._hi_stale:
            held, row = pos[self.first : self.end], self.row[self.first : self.end]
            self._hi = int((held if self.is_run else held * row).max())
            self._hi_stale = False
        return self._hi

    @property
    def is_run(self) -> bool:
        """Whether no other cell lies between the members, as after a prompt into an empty cache."""
        return self.count == self.end - self.first

    def _emptied(self) -> None:
        self.count = self.first = self.end = 0
        self._lo = self._hi = NO_POS
        self._lo_stale = self._hi_stale = False


def _both(some: BoolArray | None, more: BoolArray) -> BoolArray:
    """Return where both hold; None holds everywhere."""
    return more if some is None else some & more
