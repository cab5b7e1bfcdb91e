"""What happens to cells: they are filled, shared, moved and emptied.

Knows neither slots nor tensors. Every operation takes one cell index or an array of distinct ones, and checks
its preconditions before it changes anything. Source: spec cells.md; follows llama.cpp's ``llama_kv_cells``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykv.cells.cell_check import check_cells
from pykv.cells.cell_table import NO_TOKEN, Cells, CellTable
from pykv.cells.seq_cells import SeqCells, ends, tokens_by_sequence
from pykv.errors import ParamError
from pykv.typing import NO_POS, POS_INF, BoolArray, I32Array, I64Array


@dataclass(frozen=True, eq=False)
class CellSnapshot:
    """Copies of k cells: (k,) arrays, and per sequence (k,) flags of those that it owns."""

    pos: I32Array
    shift: I32Array
    ext: tuple[I32Array, I32Array, I32Array]
    owners: dict[int, BoolArray]


class KVCells(CellTable):
    """Bookkeeping of the `n` cells of one stream.

    Parameters
    ----------
    n : number of cells.
    reference_div_sign : record the shift of `pos_div` with llama.cpp's sign.
    """

    def __init__(self, n: int, *, reference_div_sign: bool = False) -> None:
        super().__init__(n)
        self._div_sign = -1 if reference_div_sign else 1

    def check(self) -> None:
        """Verify every cached figure from scratch; raises AssertionError."""
        check_cells(self)

    def pos_set(self, idxs: Cells, p: int | np.int32 | I32Array) -> None:
        """Occupy empty cells at position `p`, one for all or (k,). Leaves `ext` and `shift`."""
        idxs, _, last = self._distinct(idxs)
        if idxs.size == 0:
            return
        if ends(self._pos[idxs])[1] != NO_POS:
            raise ParamError(f"idxs: cells {idxs[self._pos[idxs] != NO_POS]} are occupied already")
        lo, hi = (p, p) if isinstance(p, (int, np.integer)) else ends(p)
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
