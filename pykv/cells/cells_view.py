"""CellsView: the cells of one stream, to be looked at and never changed."""

from __future__ import annotations

import numpy as np

from pykv.cells.arguments import integer, sequence_id
from pykv.cells.kv_cells import KVCells
from pykv.typing import MAX_SEQ, NO_POS, AnyArray, BoolArray, I32Array


class CellsView:
    """A stream as it is now: nothing is copied, so the arrays are read-only and follow every later change.

    Take a copy (``view.pos.copy()``) of what shall stay as it is.
    """

    def __init__(self, cells: KVCells) -> None:
        self._cells = cells

    @property
    def n(self) -> int:
        """Number of cells."""
        return self._cells.n

    @property
    def n_used(self) -> int:
        """Cells that hold something."""
        return self._cells.n_used

    @property
    def pos(self) -> I32Array:
        """(n,) position of each cell, -1 = empty."""
        return self._cells.pos

    @property
    def shift(self) -> I32Array:
        """(n,) position delta that the stored keys have yet to follow."""
        return self._cells.shift

    @property
    def token(self) -> I32Array:
        """(n,) token of each cell, -1 where none is known."""
        return self._cells.ext_tok

    @property
    def n_owners(self) -> AnyArray:
        """(n,) how many sequences each cell belongs to."""
        return self._cells.n_owners

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that have cells, ascending."""
        return self._cells.sequences()

    def member(self, seq_id: int) -> BoolArray:
        """Return (n,) whether each cell belongs to a sequence."""
        return self._cells.member(sequence_id("seq_id", seq_id, MAX_SEQ))

    @property
    def owners(self) -> BoolArray:
        """(n_seq, n) whether a cell belongs to a sequence, n_seq the largest id in use plus one. A copy, read-only."""
        return self.owners_before(self.n)

    def owners_before(self, end: int) -> BoolArray:
        """Return (n_seq, end) as `owners`, of the cells before one."""
        sequences, end = self.sequences, integer("end", end, 0, self.n)
        owners = np.zeros((max(sequences, default=-1) + 1, end), np.bool_)
        for s in sequences:
            owners[s] = self._cells.member(s)[:end]
        owners.flags.writeable = False
        return owners

    def owners_of(self, cell: int) -> tuple[int, ...]:
        """Return the sequences of one cell, ascending."""
        return self._cells.owners(integer("cell", cell, 0, self.n - 1))

    def words(self) -> list[str]:
        """Return a word a cell up to the last used one: ``2:5{0,1}`` position 5 of sequences 0 and 1, ``3:.`` empty."""
        words = []
        for i, p in enumerate(self.pos[: self._cells.used_max_p1].tolist()):
            owners = ",".join(map(str, self.owners_of(i)))
            words.append(f"{i}:." if p == NO_POS else f"{i}:{p}{{{owners}}}")
        return words

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"CellsView({self.n_used} of {self.n} cells used by {len(self.sequences)} sequences)"
