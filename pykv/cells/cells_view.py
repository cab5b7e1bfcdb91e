"""CellsView: the cells of one stream, to be looked at and never changed."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from pykv.cells.kv_cells import KVCells
from pykv.typing import AnyArray, BoolArray, I32Array

A = TypeVar("A", bound=AnyArray)


class CellsView:
    """What a stream holds at the moment of asking; every array is a copy.

    Attributes
    ----------
    n : number of cells.
    pos : (n,) position of each cell, -1 = empty.
    shift : (n,) position delta that the stored keys have yet to follow.
    token : (n,) token of each cell, -1 where none is known.
    owners : (n_seq, n) whether a cell belongs to a sequence; n_seq is the largest id in use plus one.
    """

    def __init__(self, cells: KVCells) -> None:
        self.n = cells.n
        self.pos: I32Array = _copy(cells.pos)
        self.shift: I32Array = _copy(cells.shift)
        self.token: I32Array = _copy(cells.ext_tok)
        sequences = cells.sequences()
        owners = np.zeros((max(sequences, default=-1) + 1, cells.n), np.bool_)
        for s in sequences:
            owners[s] = cells.member(s)
        owners.flags.writeable = False
        self.owners: BoolArray = owners

    @property
    def n_used(self) -> int:
        """Cells that hold something."""
        return int(np.count_nonzero(self.pos >= 0))

    def owners_of(self, cell: int) -> tuple[int, ...]:
        """Return the sequences of one cell, ascending."""
        return tuple(np.flatnonzero(self.owners[:, cell]).tolist())

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"CellsView({self.n_used} of {self.n} cells used by {int(self.owners.any(axis=1).sum())} sequences)"


def _copy(array: A) -> A:
    copy = array.copy()
    copy.flags.writeable = False
    return copy
