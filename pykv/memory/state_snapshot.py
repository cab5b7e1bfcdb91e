"""What a snapshot holds of a recurrent memory: the state of one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pykv.errors import ParamError
from pykv.memory.saved_rows import HostRows, RowsOf, saved
from pykv.memory.snapshot import Write

if TYPE_CHECKING:
    from pykv.memory.recurrent import RecurrentMemory


def layout(memory: RecurrentMemory) -> object:
    """Return what a memory stores of each sequence, in a form to compare."""
    return tuple((layer.il, layer.state) for layer in memory.plan.layers)


class StatePiece:
    """The R and S rows of a sequence; nothing of it where it is empty.

    Raises
    ------
    ParamError : the state is not that of a sequence which ends before `position`.
    """

    def __init__(self, memory: RecurrentMemory, seq_id: int, position: int, on: str) -> None:
        end = memory.states.pos_max(seq_id) + 1
        if end != position:
            raise ParamError(f"seq_id={seq_id}: its state ends before {end}, and what is attended to before {position}")
        self._position, row = position, memory.states.row(seq_id)
        self._rows = saved([] if row is None else _rows_of(memory, row), on)

    @property
    def nbytes(self) -> int:
        """Bytes of the copied rows."""
        return self._rows.nbytes

    def check(self, memory: RecurrentMemory, seq_id: int) -> None:
        """Require nothing: a state stands for all."""

    def place(self, memory: RecurrentMemory, seq_id: int) -> Write:
        """See `Piece.place`."""
        if self._position == 0:
            memory.states.seq_rm(seq_id)
            return lambda: None
        targets = _rows_of(memory, memory.states.place(seq_id, self._position - 1))
        return lambda: self._rows.write_to(targets)

    def close(self) -> None:
        """See `Piece.close`."""
        self._rows.close()


class KeptStates:
    """Copies of some rows of all layers, in host memory, to be put back where they were.

    Attributes
    ----------
    rows : which.
    """

    def __init__(self, memory: RecurrentMemory, rows: tuple[int, ...]) -> None:
        self.rows, self._places = rows, _rows_of(memory, *rows) if rows else []
        self._data = HostRows(self._places)

    def put_back(self) -> None:
        """Write the copies into their rows. Mutates the tensors."""
        self._data.write_to(self._places)


def _rows_of(memory: RecurrentMemory, *rows: int) -> list[RowsOf]:
    """Return some rows of every tensor."""
    found = []
    for layer in memory.plan.layers:
        for tensor in memory.tensors(layer.il):
            if tensor is not None:
                found.append(RowsOf(tensor, np.array(rows), layer.buffer_type))
    return found
