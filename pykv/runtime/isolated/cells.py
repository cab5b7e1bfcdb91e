"""IsolatedCells: the cells of one stream of a memory in another process."""

from __future__ import annotations

from pykv.isolation import Link, Ref
from pykv.runtime.isolated.remote import RemoteObject
from pykv.typing import AnyArray, BoolArray, I32Array


class IsolatedCells(RemoteObject):
    """Offers what `CellsView` and `RecurrentView` do. It follows every later change; arrays are copies, read-only."""

    def __init__(self, link: Link, ref: Ref) -> None:
        self._bind(link, ref)

    @property
    def n(self) -> int:
        """Number of cells."""
        return int(self._get("n"))

    @property
    def n_used(self) -> int:
        """Cells that hold something."""
        return int(self._get("n_used"))

    @property
    def pos(self) -> I32Array:
        """(n,) position of each cell, -1 = empty."""
        return self._array("pos")

    @property
    def shift(self) -> I32Array:
        """(n,) position delta that the stored keys have yet to follow."""
        return self._array("shift")

    @property
    def token(self) -> I32Array:
        """(n,) token of each cell, -1 where none is known."""
        return self._array("token")

    @property
    def n_owners(self) -> AnyArray:
        """(n,) how many sequences each cell belongs to."""
        return self._array("n_owners")

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that have cells, ascending."""
        return tuple(self._get("sequences"))

    def member(self, seq_id: int) -> BoolArray:
        """Return (n,) whether each cell belongs to a sequence."""
        return _frozen(self._call("member", seq_id))

    @property
    def owners(self) -> BoolArray:
        """(n_seq, n) whether a cell belongs to a sequence, n_seq the largest id in use plus one."""
        return self._array("owners")

    def owners_before(self, end: int) -> BoolArray:
        """Return (n_seq, end) as `owners`, of the cells before one."""
        return _frozen(self._call("owners_before", end))

    def owners_of(self, cell: int) -> tuple[int, ...]:
        """Return the sequences of one cell, ascending."""
        return tuple(self._call("owners_of", cell))

    def words(self) -> list[str]:
        """Return a word a cell up to the last used one, see `CellsView.words` and `RecurrentView.words`."""
        return list(self._call("words"))

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"IsolatedCells({self.n_used} of {self.n} cells used by {len(self.sequences)} sequences)"

    def _array(self, name: str) -> AnyArray:
        return _frozen(self._get(name))


def _frozen(array: AnyArray) -> AnyArray:
    array.flags.writeable = False
    return array
