"""What happens to cells: they are filled, shared, moved and emptied.

Knows neither slots nor tensors. Every operation takes one cell index or an array of distinct ones, and checks
its preconditions before it changes anything. Source: spec cells.md; follows llama.cpp's ``llama_kv_cells``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykv.batch.arrays import ends
from pykv.cells.cell_check import check_cells
from pykv.cells.cell_table import NO_EXT, CellTable
from pykv.cells.picked import Cells, Picked
from pykv.cells.seq_cells import SeqCells, tokens_by_sequence
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
        self._fill(self._picked(idxs), p)

    def ext_set(self, idxs: Cells, x: int | I32Array, y: int | I32Array, tok: int | I32Array) -> None:
        """Record column, row and token, each one for all or (k,)."""
        at = self._picked(idxs).at
        self._ext_x[at] = x
        self._ext_y[at] = y
        self._ext_tok[at] = tok

    def seq_add(self, idxs: Cells, s: int) -> None:
        """Give occupied cells to a sequence that does not own them yet."""
        cells = self._occupied(idxs)
        row = self.member(s)
        if np.count_nonzero(row[cells.at]):
            raise ParamError(f"idxs: cells {cells.idxs[row[cells.at]]} belong to sequence {s} already")
        if cells.n:
            self._own(cells, s, self._pos[cells.at])
            self._n_owners[cells.at] += 1

    def store(self, idxs: Cells, pos: I32Array, seq_ids: tuple[tuple[int, ...], ...]) -> None:
        """Fill empty cells with as many tokens: `pos_set`, then `seq_add` for every sequence of each token.

        `pos` holds (k,) positions, `seq_ids` k times the sequences of one token.
        """
        groups, n_owners = tokens_by_sequence(seq_ids)
        for s in groups:
            self._absent(s)
        cells = self._picked(idxs)
        self._fill(cells, pos)
        for s, tokens in groups.items():
            mine = cells if isinstance(tokens, slice) else self._picked(cells.idxs[tokens])
            self._own(mine, s, pos[tokens])
        self._n_owners[cells.at] = n_owners

    def seq_rm(self, idxs: Cells, s: int) -> BoolArray:
        """Take cells away from a sequence that owns them. Returns (k,) which became empty."""
        cells = self._picked(idxs)
        mine = self.member(s)[cells.at]
        if np.count_nonzero(mine) != cells.n:
            raise ParamError(f"idxs: cells {cells.idxs[~mine]} do not belong to sequence {s}")
        if cells.n == 0:
            return np.zeros(0, np.bool_)
        self._seqs[s].drop(cells, self._pos[cells.at])
        self._n_owners[cells.at] -= 1
        emptied: BoolArray = self._n_owners[cells.at] == 0
        self._free(cells.where(emptied))
        return emptied

    def seq_keep(self, idxs: Cells, s: int) -> BoolArray:
        """Leave cells to one sequence alone; empty those of others. Returns (k,) which became empty.

        Occupied cells without any owner stay as they are.
        """
        cells = self._picked(idxs)
        kept = self.member(s)[cells.at]
        emptied: BoolArray = ~kept & (self._n_owners[cells.at] > 0)
        self._disown(cells, keep=s)
        self._n_owners[cells.at] = kept
        self._free(cells.where(emptied))
        return emptied

    def rm(self, idxs: Cells) -> None:
        """Empty occupied cells, whoever owns them."""
        cells = self._occupied(idxs)
        self._disown(cells)
        self._free(cells)

    def pos_add(self, idxs: Cells, d: int) -> BoolArray:
        """Move occupied cells by `d` positions, for all owners. Returns (k,) which fell below 0, now empty.

        Also sets `has_shift` for ``d == 0``. Cells emptied here keep their `ext`.
        """
        cells = self._occupied(idxs)
        if cells.n == 0:
            return np.zeros(0, np.bool_)
        lo, hi = ends(self._pos[cells.at])
        if hi + d >= POS_INF:
            raise ParamError(f"d = {d}: position {hi + d} would pass the limit {POS_INF - 1}")
        emptied: BoolArray = np.zeros(cells.n, np.bool_) if lo + d >= 0 else self._pos[cells.at] < -d
        gone, rest = cells.where(emptied), cells.where(~emptied)
        if rest.n:
            self._pos[rest.at] += d
            self._moved(rest, d)
        self._disown(gone)
        self._free(gone, reset_ext=False)
        self.has_shift = True
        return emptied

    def pos_div(self, idxs: Cells, d: int) -> None:
        """Divide the positions of occupied cells by `d` >= 1, rounding down, for all their owners."""
        if d < 1:
            raise ParamError(f"d = {d}: positions can be divided by 1 and up")
        cells = self._occupied(idxs)
        if cells.n:
            old = self._pos[cells.at].copy()
            self._pos[cells.at] = new = old // np.int64(d)
            # differs from llama.cpp: the shift is new - old, because keys turned by old - new go the wrong way
            self._moved(cells, (new - old) * self._div_sign)
            self.has_shift = True

    def snapshot(self, idxs: Cells) -> CellSnapshot:
        """Copy cells, to be put back by `restore`."""
        # differs from llama.cpp: the shift is copied too, because a trial may run while shifts are pending
        at = self._picked(idxs).at
        owners = {s: self._seqs[s].row[at].copy() for s in self.sequences()}
        x, y, tok = self._ext[:, at].copy()
        return CellSnapshot(self._pos[at].copy(), self._shift[at].copy(), (x, y, tok), owners)

    def restore(self, idxs: Cells, snap: CellSnapshot) -> None:
        """Overwrite cells, occupied or not, with as many copied ones."""
        cells = self._picked(idxs)
        if cells.n != snap.pos.size:
            raise ParamError(f"snap: holds {snap.pos.size} cells, idxs names {cells.n}")
        held = cells.where(self._pos[cells.at] != NO_POS)
        self._disown(held)
        self._free(held)
        filled = snap.pos != NO_POS
        self._fill(cells.where(filled), snap.pos[filled])
        for s, owned in snap.owners.items():
            self.seq_add(cells.idxs[owned], s)
        self.ext_set(cells.idxs, *snap.ext)
        self._shift[cells.at] = snap.shift
        self.has_shift |= bool(snap.shift.any())

    # mechanism

    def _fill(self, cells: Picked, p: int | np.int32 | I32Array) -> None:
        """Occupy cells if they are empty; the caller gives them owners."""
        if cells.n == 0:
            return
        held = self._pos[cells.at]
        if ends(held)[1] != NO_POS:
            raise ParamError(f"idxs: cells {cells.idxs[held != NO_POS]} are occupied already")
        lo, hi = (p, p) if isinstance(p, (int, np.integer)) else ends(p)
        if lo < 0 or hi >= POS_INF:
            raise ParamError(f"p = {lo if lo < 0 else hi}: positions are 0 to {POS_INF - 1}")
        self._pos[cells.at] = p
        self.n_used += cells.n
        if cells.last + 1 >= self._end:
            self._end, self._end_stale = cells.last + 1, False

    def _own(self, cells: Picked, s: int, pos: I32Array) -> None:
        """Let a sequence list cells that hold `pos`; the caller sets `n_owners`."""
        seq = self._seqs.get(s)
        if seq is None:
            seq = self._seqs[s] = SeqCells(self.n)
        seq.add(cells, pos)

    def _disown(self, cells: Picked, keep: int | None = None) -> None:
        """Take cells out of every sequence but `keep`; the caller sets `n_owners`."""
        for s, seq in self._seqs.items():
            if s != keep and seq.owns_any(cells):
                mine = cells.where(seq.row[cells.at])
                seq.drop(mine, self._pos[mine.at])

    def _free(self, cells: Picked, *, reset_ext: bool = True) -> None:
        """Empty cells that no sequence lists any more."""
        if cells.n == 0:
            return
        self._pos[cells.at] = NO_POS
        self._n_owners[cells.at] = 0
        if self.has_shift:  # else there is none to reset
            self._shift[cells.at] = 0
        if reset_ext:
            self._ext[:, cells.at] = NO_EXT
        self.n_used -= cells.n
        self._end_stale |= cells.last + 1 >= self._end

    def _moved(self, cells: Picked, by: int | I64Array) -> None:
        """Record that occupied cells have got other positions."""
        self._shift[cells.at] += np.asarray(by, np.int32)
        for seq in self._seqs.values():
            if seq.owns_any(cells):
                seq.moved()
