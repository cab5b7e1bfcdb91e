"""What each cell of one stream holds: its position, its pending shift, its owners. A struct of arrays.

Knows neither slots nor tensors. Every operation takes one cell index or an array of distinct ones, and checks
its preconditions before it changes anything. Source: spec cells.md; follows llama.cpp's ``llama_kv_cells``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pykv.cells.cell_check import check_cells
from pykv.cells.seq_cells import SeqCells, ends, tokens_by_sequence
from pykv.errors import ParamError, SequenceError
from pykv.typing import MAX_SEQ, NO_POS, POS_INF, AnyArray, BoolArray, I32Array, I64Array

Cells = int | Sequence[int] | I64Array
"""One cell index, or several distinct ones in any order."""

NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class CellSnapshot:
    """Copies of k cells: (k,) arrays, and per sequence (k,) flags of those that it owns."""

    pos: I32Array
    shift: I32Array
    ext: tuple[I32Array, I32Array, I32Array]
    owners: dict[int, BoolArray]


class KVCells:
    """Bookkeeping of the `n` cells of one stream.

    Attributes
    ----------
    n : number of cells.
    pos : (n,) position, -1 = empty.
    shift : (n,) position delta since the last `reset_shift`.
    ext_x, ext_y, ext_tok : (n,) column, row and token of occupied cells.
    n_owners : (n,) number of sequences of the cell; an occupied cell may have none (whole-state restore).
    has_shift : whether positions moved since the last `reset_shift`, also if the moved cells are gone.
    n_used : number of occupied cells.

    The arrays are read-only views that follow every change.

    Parameters
    ----------
    reference_div_sign : record the shift of `pos_div` with llama.cpp's sign.
    """

    def __init__(self, n: int, *, reference_div_sign: bool = False) -> None:
        self._div_sign = -1 if reference_div_sign else 1
        self.resize(n)

    # whole stream

    def resize(self, n: int) -> None:
        """Start over with `n` empty cells. Earlier views no longer follow."""
        if n < 1:
            raise ParamError(f"n = {n}: a stream needs at least 1 cell")
        self.n = n
        self._pos, self._shift, self._ext_x, self._ext_y, self._ext_tok = (np.empty(n, np.int32) for _ in range(5))
        self._n_owners = np.empty(n, np.int16)
        self._seqs: dict[int, SeqCells] = {}
        self.pos, self.shift = _read_only(self._pos), _read_only(self._shift)
        self.ext_x, self.ext_y, self.ext_tok = map(_read_only, (self._ext_x, self._ext_y, self._ext_tok))
        self.n_owners = _read_only(self._n_owners)
        self._nobody = _read_only(np.zeros(n, np.bool_))
        self.reset()

    def reset(self) -> None:
        """Empty every cell and forget pending shifts."""
        self._pos.fill(NO_POS)
        self._ext_tok.fill(NO_TOKEN)
        for zeroed in (self._shift, self._ext_x, self._ext_y, self._n_owners):
            zeroed.fill(0)
        for seq in self._seqs.values():
            seq.clear()
        self.has_shift = False
        self.n_used = 0
        self._end, self._end_stale = 0, False

    def reset_shift(self) -> None:
        """Forget pending shifts: the keys have been moved."""
        self._shift.fill(0)
        self.has_shift = False

    def check(self) -> None:
        """Verify every cached figure from scratch; raises AssertionError."""
        check_cells(self)

    # questions

    @property
    def used_min(self) -> int:
        """Smallest occupied index, 0 if there is none."""
        return int((self._pos != NO_POS).argmax()) if self.n_used else 0

    @property
    def used_max_p1(self) -> int:
        """Largest occupied index + 1, 0 if there is none."""
        if self._end_stale:
            self._end, self._end_stale = _end_of_used(self._pos[: self._end]), False
        return self._end

    def pos_min(self, s: int) -> int:
        """Return the smallest position of a sequence, -1 without cells."""
        seq = self._seqs.get(s)
        return seq.pos_min(self._pos[: self._end], seq.count == self.n_used) if seq else self._absent(s)

    def pos_max(self, s: int) -> int:
        """Return the largest position of a sequence, -1 without cells."""
        seq = self._seqs.get(s)
        return seq.pos_max(self._pos[: self._end], seq.count == self.n_used) if seq else self._absent(s)

    def member(self, s: int) -> BoolArray:
        """Return (n,) whether each cell belongs to a sequence: a read-only view, valid until a change."""
        seq = self._seqs.get(s)
        if seq is None:
            self._absent(s)
            return self._nobody
        return seq.view

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
        self._distinct(i)
        return tuple(s for s in self.sequences() if self._seqs[s].row[i])

    def find(self, s: int | None, p0: int, p1: int) -> I64Array:
        """Return the cells with ``p0 <= pos < p1``, ascending; with `s`, only those of that sequence.

        `p0` is at least 0, so empty cells never count.
        """
        pos = self._pos[: self._end]
        lo, hi = (self.pos_min(s), self.pos_max(s)) if s is not None else (0, POS_INF)
        if p0 > hi or p1 <= lo:
            return np.empty(0, np.int64)
        inside = pos != NO_POS if s is None else self.member(s)[: self._end]
        if p0 > lo:
            inside = inside & (pos >= p0)
        if p1 <= hi:
            inside = inside & (pos < p1)
        return _true_indices(inside)

    def seq_pos_tok_le(self, s: int, p: int) -> int:
        """Return the token at the last position <= `p` of a sequence, -1 if there is none.

        Of several cells at that position the one with the highest index counts.
        """
        return int(self.tokens_le(s, np.array([p]))[0])

    def tokens_le(self, s: int, p: I32Array | I64Array) -> I32Array:
        """Answer `seq_pos_tok_le` for (k,) positions at once: (k,) tokens."""
        pos, row = self._pos[: self._end], self.member(s)[: self._end]
        lo, hi = ends(p)
        below = pos[row & (pos <= lo)]
        first = below.max() if below.size else 0
        near = np.flatnonzero(row & (pos >= first) & (pos <= hi))
        near = near[np.argsort(pos[near], kind="stable")]
        last = np.searchsorted(pos[near], p, side="right") - 1
        toks = np.append(self._ext_tok[near], np.int32(NO_TOKEN))  # index -1 = no such cell
        return np.asarray(toks[last], np.int32)

    # one cell or several

    def pos_set(self, idxs: Cells, p: int | I32Array) -> None:
        """Occupy empty cells at position `p`, one for all or (k,). Leaves `ext` and `shift`."""
        idxs, _, last = self._distinct(idxs)
        if idxs.size == 0:
            return
        if ends(self._pos[idxs])[1] != NO_POS:
            raise ParamError(f"idxs: cells {idxs[self._pos[idxs] != NO_POS]} are occupied already")
        lo, hi = (p, p) if isinstance(p, int) else ends(p)
        if lo < 0 or hi >= POS_INF:
            raise ParamError(f"p = {lo if lo < 0 else hi}: positions are 0 to {POS_INF - 1}")
        self._pos[idxs] = p
        self.n_used += idxs.size
        if last + 1 >= self._end:
            self._end, self._end_stale = last + 1, False

    def ext_set(self, idxs: Cells, x: int | I32Array, y: int | I32Array, tok: int | I32Array) -> None:
        """Record column, row and token, each one for all or (k,)."""
        idxs, _, _ = self._distinct(idxs)
        self._ext_x[idxs] = x
        self._ext_y[idxs] = y
        self._ext_tok[idxs] = tok

    def seq_add(self, idxs: Cells, s: int) -> None:
        """Give occupied cells to a sequence that does not own them yet."""
        idxs = self._occupied(idxs)
        row = self.member(s)
        if np.count_nonzero(row[idxs]):
            raise ParamError(f"idxs: cells {idxs[row[idxs]]} belong to sequence {s} already")
        if idxs.size:
            self._own(idxs, s, self._pos[idxs])
            self._n_owners[idxs] += 1

    def store(self, idxs: I64Array, pos: I32Array, seq_ids: tuple[tuple[int, ...], ...]) -> None:
        """Fill empty cells with as many tokens: `pos_set`, then `seq_add` for every sequence of each token.

        `pos` holds (k,) positions, `seq_ids` k times the sequences of one token.
        """
        groups, n_owners = tokens_by_sequence(seq_ids)
        for s in groups:
            self._absent(s)
        self.pos_set(idxs, pos)
        for s, tokens in groups.items():
            self._own(idxs[tokens], s, pos[tokens])
        self._n_owners[idxs] = n_owners

    def seq_rm(self, idxs: Cells, s: int) -> BoolArray:
        """Take cells away from a sequence that owns them. Returns (k,) which became empty."""
        idxs = self._occupied(idxs)
        row = self.member(s)
        if np.count_nonzero(row[idxs]) != idxs.size:
            raise ParamError(f"idxs: cells {idxs[~row[idxs]]} do not belong to sequence {s}")
        if idxs.size == 0:
            return np.zeros(0, np.bool_)
        self._seqs[s].drop(idxs, self._pos[idxs])
        left = self._n_owners[idxs] - 1
        self._n_owners[idxs] = left
        emptied = left == 0
        self._free(idxs[emptied])
        return np.asarray(emptied)

    def seq_keep(self, idxs: Cells, s: int) -> BoolArray:
        """Leave cells to one sequence alone; empty those of others. Returns (k,) which became empty.

        Occupied cells without any owner stay as they are.
        """
        idxs, _, _ = self._distinct(idxs)
        kept = self.member(s)[idxs]
        emptied = ~kept & (self._n_owners[idxs] > 0)
        self._disown(idxs, keep=s)
        self._n_owners[idxs[kept]] = 1
        self._free(idxs[emptied])
        return np.asarray(emptied)

    def rm(self, idxs: Cells) -> None:
        """Empty occupied cells, whoever owns them."""
        idxs = self._occupied(idxs)
        self._disown(idxs)
        self._free(idxs)

    def pos_add(self, idxs: Cells, d: int) -> BoolArray:
        """Move occupied cells by `d` positions, for all owners. Returns (k,) which fell below 0, now empty.

        Also sets `has_shift` for ``d == 0``. Cells emptied here keep their `ext`.
        """
        idxs = self._occupied(idxs)
        moved = self._pos[idxs] + np.int64(d)
        if np.count_nonzero(moved >= POS_INF):
            raise ParamError(f"d = {d}: position {moved.max()} would pass the limit {POS_INF - 1}")
        emptied = moved < 0
        self._move(idxs[~emptied], moved[~emptied])
        gone = idxs[emptied]
        self._disown(gone)
        self._free(gone, reset_ext=False)
        self.has_shift |= idxs.size > 0
        return np.asarray(emptied)

    def pos_div(self, idxs: Cells, d: int) -> None:
        """Divide the positions of occupied cells by `d` >= 1, rounding down, for all their owners."""
        if d < 1:
            raise ParamError(f"d = {d}: positions can be divided by 1 and up")
        idxs = self._occupied(idxs)
        # differs from llama.cpp: the shift is new - old, because keys turned by old - new go the wrong way
        self._move(idxs, self._pos[idxs] // np.int64(d), self._div_sign)
        self.has_shift |= idxs.size > 0

    def snapshot(self, idxs: Cells) -> CellSnapshot:
        """Copy cells, to be put back by `restore`."""
        # differs from llama.cpp: the shift is copied too, because a trial may run while shifts are pending
        idxs, _, _ = self._distinct(idxs)
        owners = {s: self._seqs[s].row[idxs] for s in self.sequences()}
        ext = (self._ext_x[idxs], self._ext_y[idxs], self._ext_tok[idxs])
        return CellSnapshot(self._pos[idxs], self._shift[idxs], ext, owners)

    def restore(self, idxs: Cells, snap: CellSnapshot) -> None:
        """Overwrite cells, occupied or not, with as many copied ones."""
        idxs, _, _ = self._distinct(idxs)
        if idxs.size != snap.pos.size:
            raise ParamError(f"snap: holds {snap.pos.size} cells, idxs names {idxs.size}")
        self.rm(idxs[self._pos[idxs] != NO_POS])
        filled = snap.pos != NO_POS
        self.pos_set(idxs[filled], snap.pos[filled])
        for s, owned in snap.owners.items():
            self.seq_add(idxs[owned], s)
        self.ext_set(idxs, *snap.ext)
        self._shift[idxs] = snap.shift
        self.has_shift |= bool(snap.shift.any())

    # mechanism

    def _distinct(self, idxs: Cells) -> tuple[I64Array, int, int]:
        """Return `idxs` as an array, with the smallest and the largest of them."""
        arr = np.array([idxs], np.int64) if isinstance(idxs, int) else np.asarray(idxs, np.int64)
        if arr.size == 0:
            return arr, 0, -1
        lo, hi = ends(arr)
        if lo < 0 or hi >= self.n:
            raise ParamError(f"idxs: cell {lo if lo < 0 else hi} is outside 0 to {self.n - 1}")
        ascending = arr.size == 1 or np.count_nonzero(arr[1:] > arr[:-1]) == arr.size - 1
        if not ascending and np.unique(arr).size != arr.size:
            raise ParamError(f"idxs: {arr} names a cell twice")
        return arr, lo, hi

    def _occupied(self, idxs: Cells) -> I64Array:
        arr, _, _ = self._distinct(idxs)
        if arr.size and ends(self._pos[arr])[0] == NO_POS:
            raise ParamError(f"idxs: cells {arr[self._pos[arr] == NO_POS]} are empty")
        return arr

    @staticmethod
    def _absent(s: int) -> int:
        """Return the position of a sequence without cells, if there can be such a sequence."""
        if not 0 <= s < MAX_SEQ:
            raise SequenceError(f"seq_id = {s}: a stream tells 0 to {MAX_SEQ - 1} apart")
        return NO_POS

    def _own(self, idxs: I64Array, s: int, pos: I32Array) -> None:
        """Let a sequence list cells that hold `pos`; the caller sets `n_owners`."""
        seq = self._seqs.get(s)
        if seq is None:
            seq = self._seqs[s] = SeqCells(self.n)
        seq.add(idxs, pos)

    def _disown(self, idxs: I64Array, keep: int | None = None) -> None:
        """Take cells out of every sequence but `keep`; the caller sets `n_owners`."""
        for s, seq in self._seqs.items():
            if seq.count and s != keep:
                mine = idxs[seq.row[idxs]]
                if mine.size:
                    seq.drop(mine, self._pos[mine])

    def _free(self, idxs: I64Array, *, reset_ext: bool = True) -> None:
        """Empty cells that no sequence lists any more."""
        if idxs.size == 0:
            return
        self._pos[idxs] = NO_POS
        self._shift[idxs] = 0
        self._n_owners[idxs] = 0
        if reset_ext:
            self.ext_set(idxs, 0, 0, NO_TOKEN)
        self.n_used -= idxs.size
        self._end_stale |= ends(idxs)[1] + 1 >= self._end

    def _move(self, idxs: I64Array, pos: I64Array, sign: int = 1) -> None:
        """Give occupied cells other positions and record the change."""
        self._shift[idxs] += ((pos - self._pos[idxs]) * sign).astype(np.int32)
        self._pos[idxs] = pos
        for seq in self._seqs.values():
            if np.count_nonzero(seq.row[idxs]):
                seq.moved()


def _end_of_used(pos: I32Array) -> int:
    """Return the largest occupied index + 1, looking back in growing blocks: the end rarely moves far."""
    end, block = pos.size, 64
    while end > 0:
        start = max(0, end - block)
        used = np.flatnonzero(pos[start:end] != NO_POS)
        if used.size:
            return start + int(used[-1]) + 1
        end, block = start, 4 * block
    return 0


def _true_indices(flags: BoolArray) -> I64Array:
    """Return where flags are set. Finds both ends first: that is ten times faster than listing what lies between."""
    start = int(flags.argmax()) if flags.size else 0
    if flags.size == 0 or not flags[start]:
        return np.empty(0, np.int64)
    stop = flags.size - int(flags[::-1].argmax())
    return np.flatnonzero(flags[start:stop]) + start


def _read_only(array: AnyArray) -> AnyArray:
    view = array.view()
    view.flags.writeable = False
    return view
