"""RecurrentView: the cells of a recurrent memory, to be looked at and never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pykv.cells.arguments import integer, sequence_id
from pykv.typing import NO_POS, BoolArray, I32Array

if TYPE_CHECKING:
    from pykv.cells.recurrent_states import RecurrentStates


class RecurrentView:
    """The states as they are now, under the names that `CellsView` has for tokens.

    It follows every later change; arrays are copies, read-only.
    """

    def __init__(self, cells: RecurrentStates) -> None:
        self._cells = cells

    @property
    def n(self) -> int:
        """Number of cells."""
        return self._cells.n_cells

    @property
    def n_used(self) -> int:
        """Cells that hold a state."""
        return self._cells.table.used

    @property
    def pos(self) -> I32Array:
        """(n,) position of each cell's first sequence, -1 = empty."""
        table = self._cells.table
        return _frozen([table.pos(ids[0]) if ids else NO_POS for ids in table.owners])

    @property
    def shift(self) -> I32Array:
        """(n,) zeros: a state does not know its position."""
        return _frozen([0] * self.n)

    @property
    def token(self) -> I32Array:
        """(n,) -1: a state stands for many tokens."""
        return _frozen([-1] * self.n)

    @property
    def n_owners(self) -> I32Array:
        """(n,) how many sequences each cell belongs to."""
        return _frozen([len(ids) for ids in self._cells.table.owners])

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that have a state, ascending."""
        return tuple(s for s, trail in enumerate(self._cells.table.trail) if trail)

    def member(self, seq_id: int) -> BoolArray:
        """Return (n,) whether each cell belongs to a sequence."""
        seq_id = sequence_id("seq_id", seq_id, self._cells.n_seq_max)
        member = np.array([seq_id in ids for ids in self._cells.table.owners])
        member.flags.writeable = False
        return member

    @property
    def owners(self) -> BoolArray:
        """(n_seq, n) whether a cell belongs to a sequence, n_seq the largest id in use plus one."""
        owners = np.zeros((max(self.sequences, default=-1) + 1, self.n), np.bool_)
        for s in self.sequences:
            owners[s, self._cells.table.tail[s]] = True
        owners.flags.writeable = False
        return owners

    def owners_of(self, cell: int) -> tuple[int, ...]:
        """Return the sequences of one cell, ascending."""
        return self._cells.table.owners[integer("cell", cell, 0, self.n - 1)]

    def words(self) -> list[str]:
        """Return a word a cell up to the last used one.

        ``2:5{0,1}`` a state after position 5 of sequences 0 and 1; ``2:5{0},3{1}^2`` the same cell when 1 has been
        taken back to plane 2; ``3:.`` an empty one.
        """
        table = self._cells.table
        end = max((c + 1 for c, ids in enumerate(table.owners) if ids), default=0)
        words = []
        for cell, ids in enumerate(table.owners[:end]):
            states: dict[tuple[int, int], list[int]] = {}
            for s in ids:
                states.setdefault((table.pos(s), table.plane[s]), []).append(s)
            told = [f"{p}{{{','.join(map(str, who))}}}" + (f"^{d}" if d else "") for (p, d), who in states.items()]
            words.append(f"{cell}:{','.join(told) or '.'}")
        return words


def _frozen(values: list[int]) -> I32Array:
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array
