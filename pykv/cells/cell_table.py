"""The arrays of one stream of cells, and what can be read from them.

`KVCells` adds what changes cells one by one. Source: spec cells.md section 1.
"""

from __future__ import annotations

import numpy as np

from pykv.batch.arrays import ends
from pykv.cells.arguments import integer
from pykv.cells.picked import Cells, Picked, pick
from pykv.cells.seq_cells import SeqCells
from pykv.errors import ParamError, SequenceError
from pykv.typing import MAX_SEQ, NO_POS, POS_INF, AnyArray, BoolArray, I32Array, I64Array

NO_TOKEN = -1
NO_EXT = np.array([[0], [0], [NO_TOKEN]], np.int32)
"""(3, 1) column, row and token of an empty cell."""


class CellTable:
    """State of the `n` cells of one stream, with figures that are cached and recounted only when asked for.

    Attributes
    ----------
    n : number of cells.
    pos : (n,) position, -1 = empty.
    shift : (n,) position delta since the last `reset_shift`.
    ext_x, ext_y, ext_tok : (n,) column, row and token of occupied cells.
    n_owners : (n,) number of sequences of the cell; an occupied cell may have none (whole-state restore).
    has_shift : whether positions moved since the last `reset_shift`, also if the moved cells are gone.
    n_used : number of occupied cells.
    n_gone : cells that a search counts as occupied too: what a window hid there did not come back with a snapshot.

    The arrays are read-only views that follow every change.
    """

    def __init__(self, n: int) -> None:
        self.resize(n)

    # whole stream

    def resize(self, n: int) -> None:
        """Start over with `n` empty cells. Earlier views no longer follow."""
        if n < 1:
            raise ParamError(f"n = {n}: a stream needs at least 1 cell")
        self.n = n
        self._pos, self._shift, self._ext = np.empty(n, np.int32), np.empty(n, np.int32), np.empty((3, n), np.int32)
        self._n_owners = np.empty(n, np.int16)
        self._seqs: dict[int, SeqCells] = {}
        self.pos, self.shift = _read_only(self._pos), _read_only(self._shift)
        self._ext_x, self._ext_y, self._ext_tok = self._ext
        self.ext_x, self.ext_y, self.ext_tok = map(_read_only, self._ext)
        self.n_owners = _read_only(self._n_owners)
        self._nobody = _read_only(np.zeros(n, np.bool_))
        self.reset()

    def reset(self) -> None:
        """Empty every cell and forget pending shifts."""
        self._pos.fill(NO_POS)
        self._ext[:] = NO_EXT
        self._shift.fill(0)
        self._n_owners.fill(0)
        for seq in self._seqs.values():
            seq.clear()
        self.has_shift = False
        self.n_used = self.n_gone = 0
        self._end, self._end_stale = 0, False

    def reset_shift(self, idxs: I64Array | None = None) -> None:
        """Forget pending shifts, of all cells or of some: their keys have been moved."""
        if idxs is not None:
            self._shift[idxs] = 0
        else:
            self._shift.fill(0)
            self.has_shift = False

    # questions

    @property
    def used_min(self) -> int:
        """Smallest occupied index, 0 if there is none."""
        return int((self._pos[: self._end] != NO_POS).argmax()) if self.n_used else 0

    @property
    def used_max_p1(self) -> int:
        """Largest occupied index + 1, 0 if there is none."""
        if self._end_stale:
            self._end, self._end_stale = _end_of_used(self._pos[: self._end]), False
        return self._end

    def pos_min(self, s: int) -> int:
        """Return the smallest position of a sequence, -1 without cells."""
        seq = self._seqs.get(s)
        return seq.pos_min(self._pos) if seq else self._absent(s)

    def pos_max(self, s: int) -> int:
        """Return the largest position of a sequence, -1 without cells."""
        seq = self._seqs.get(s)
        return seq.pos_max(self._pos) if seq else self._absent(s)

    def span(self, s: int) -> tuple[int, int]:
        """Return the first cell of a sequence and its last one + 1; both 0 without cells."""
        seq = self._seqs.get(s)
        return (seq.first, seq.end) if seq else (0, self._absent(s) + 1)

    def member(self, s: int) -> BoolArray:
        """Return (n,) whether each cell belongs to a sequence: a read-only view, valid until a change."""
        seq = self._seqs.get(s)
        if seq is None:
            self._absent(s)
            return self._nobody
        return seq.view

    def offset(self, s: int) -> int | None:
        """Return what every position of a sequence exceeds its cell's index by; None if unknown or not the same."""
        seq = self._seqs.get(s)
        return seq.offset if seq else None

    def seq_n_cells(self, s: int) -> int:
        """Return the number of cells of a sequence."""
        seq = self._seqs.get(s)
        return seq.count if seq else self._absent(s) + 1

    @property
    def known(self) -> tuple[int, ...]:
        """Ids of all sequences that have had cells since `resize`."""
        return tuple(self._seqs)

    def sequences(self) -> tuple[int, ...]:
        """Return the ids of all sequences that have cells, ascending."""
        return tuple(sorted(s for s, seq in self._seqs.items() if seq.count))

    def owners(self, i: int) -> tuple[int, ...]:
        """Return the ids of the sequences that cell `i` belongs to, ascending."""
        i = integer("i", i, 0, self.n - 1)
        return tuple(s for s in self.sequences() if self._seqs[s].row[i])

    def owner(self, i: int) -> int:
        """Return the id of the only sequence of cell `i`."""
        ids = self.owners(i)
        if len(ids) != 1:
            raise ParamError(f"i = {i}: the cell has {len(ids)} owners, not 1")
        return ids[0]

    def find(self, s: int | None, p0: int, p1: int) -> I64Array:
        """Return the cells with ``p0 <= pos < p1``, ascending; with `s`, only those of that sequence.

        `p0` is at least 0, so empty cells never count.
        """
        if s is not None:
            seq = self._seqs.get(s)
            return seq.find(self._pos, p0, p1) if seq else np.empty(self._absent(s) + 1, np.int64)
        pos = self._pos[: self.used_max_p1]
        if p0 == 0 and p1 == POS_INF and self.n_used == pos.size:
            return np.arange(pos.size)
        inside = pos >= p0
        return np.flatnonzero(inside if p1 == POS_INF else inside & (pos < p1))

    def seq_pos_tok_le(self, s: int, p: int) -> int:
        """Return the token at the last position <= `p` of a sequence, -1 if there is none.

        Of several cells at that position the one with the highest index counts.
        """
        return int(self.tokens_le(s, np.array([p]))[0])

    def tokens_le(self, s: int, p: I32Array | I64Array) -> I32Array:
        """Answer `seq_pos_tok_le` for (k,) positions at once: (k,) tokens."""
        span = slice(*self.span(s))
        pos, row, tok = self._pos[span], self.member(s)[span], self._ext_tok[span]
        lo, hi = ends(p)
        below = pos[row & (pos <= lo)]
        first = below.max() if below.size else 0
        near = np.flatnonzero(row & (pos >= first) & (pos <= hi))
        near = near[np.argsort(pos[near], kind="stable")]
        last = np.searchsorted(pos[near], p, side="right") - 1
        toks = np.append(tok[near], np.int32(NO_TOKEN))  # index -1 = no such cell
        return np.asarray(toks[last], np.int32)

    # mechanism

    def _picked(self, idxs: Cells) -> Picked:
        """Check that cells exist and are distinct."""
        return pick(idxs, self.n)

    def _occupied(self, idxs: Cells) -> Picked:
        """Check that cells are occupied, too."""
        cells = self._picked(idxs)
        if cells.n and ends(self._pos[cells.at])[0] == NO_POS:
            raise ParamError(f"idxs: cells {cells.idxs[self._pos[cells.at] == NO_POS]} are empty")
        return cells

    @staticmethod
    def _absent(s: int) -> int:
        """Return the position of a sequence without cells, if there can be such a sequence."""
        if not 0 <= s < MAX_SEQ:
            raise SequenceError(f"seq_id = {s}: a stream tells 0 to {MAX_SEQ - 1} apart")
        return NO_POS


def _end_of_used(pos: I32Array) -> int:
    """Return the largest occupied index + 1, looking back in growing blocks: the end rarely moves far."""
    end, block = pos.size, 64
    while end > 0:
        start = max(0, end - block)
        used = (pos[start:end] != NO_POS).nonzero()[0]
        if used.size:
            return start + int(used[-1]) + 1
        end, block = start, 4 * block
    return 0


def _read_only(array: AnyArray) -> AnyArray:
    return np.frombuffer(array.data.toreadonly(), array.dtype)  # which nobody can make writable again
