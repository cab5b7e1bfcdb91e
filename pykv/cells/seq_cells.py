"""The cells of one sequence: who they are, how many, and from which position to which.

One row of flags and two cached ends stand for an ordered set of (position, cell): a step costs array writes
instead of tree updates. Follows llama.cpp's ``llama_kv_cells::seq_pos``.
"""

from __future__ import annotations

import numpy as np

from pykv.typing import NO_POS, BoolArray, I32Array, I64Array


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
    """

    __slots__ = ("_hi", "_hi_stale", "_lo", "_lo_stale", "count", "row", "view")

    def __init__(self, n: int) -> None:
        self.row: BoolArray = np.zeros(n, np.bool_)
        self.view = self.row.view()
        self.view.flags.writeable = False
        self._emptied()

    def clear(self) -> None:
        """Forget every cell."""
        if self.count:
            self.row.fill(False)
        self._emptied()

    def add(self, idxs: I64Array, pos: I32Array) -> None:
        """Take in cells that hold `pos` and are not members yet."""
        lo, hi = ends(pos)
        if self.count == 0:
            self._lo, self._hi = lo, hi
        else:  # a stale end stays stale
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
        lo, hi = ends(pos)
        self._lo_stale |= lo <= self._lo
        self._hi_stale |= hi >= self._hi

    def moved(self) -> None:
        """Note that positions of members have changed."""
        self._lo_stale = self._hi_stale = self.count > 0

    def pos_min(self, pos: I32Array, alone: bool) -> int:
        """Return the smallest position, -1 without cells.

        `pos` holds (m,) positions of the first m cells, which include every member; `alone` says that every
        occupied cell is one.
        """
        if self._lo_stale:  # seen as unsigned, the -1 of empty cells is the largest number
            self._lo = int(pos.view(np.uint32).min() if alone else pos[self.row[: pos.size]].min())
            self._lo_stale = False
        return self._lo

    def pos_max(self, pos: I32Array, alone: bool) -> int:
        """Return the largest position, -1 without cells. Takes what `pos_min` takes."""
        if self._hi_stale:
            self._hi = int((pos if alone else pos * self.row[: pos.size]).max())
            self._hi_stale = False
        return self._hi

    def _emptied(self) -> None:
        self.count = 0
        self._lo = self._hi = NO_POS
        self._lo_stale = self._hi_stale = False
