"""The contract of a memory: what every kind can do, so that a context need not know which one it has.

Mechanism lives beside it, one kind a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from pykv.batch import UBatch, ValidBatch
from pykv.cells import CellsView
from pykv.memory.kv_graph import KVShape
from pykv.memory.shift_support import ShiftSupport


class UpdateStatus(Enum):
    """What `Memory.update` found to do."""

    NO_UPDATE = "no_update"
    SUCCESS = "success"


class MemoryContext(Protocol):
    """The plan for one batch: its ubatches and where each goes. Only `apply` changes the memory."""

    @property
    def ubatches(self) -> Sequence[UBatch]:
        """The ubatches in order."""
        ...

    def apply(self, i: int) -> KVShape:
        """Write the bookkeeping of ubatch `i`; returns what a graph must look like to read the memory then."""
        ...

    def retract(self, i: int) -> None:
        """Take ubatch `i`, applied last, out again."""
        ...


class Memory(Protocol):
    """Verbs over sequences. A negative `p0` means 0, a negative `p1` the end; ranges are half open."""

    def init_batch(self, batch: ValidBatch, n_ubatch: int) -> MemoryContext | None:
        """Split a batch and find room for all of it; None if there is none. Changes nothing."""
        ...

    def update(self) -> UpdateStatus:
        """Carry out queued changes of stored data."""
        ...

    def clear(self, data: bool = True) -> None:
        """Empty all cells; with `data`, also zero the buffers."""
        ...

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence, or of all with -1; False if this memory cannot, with nothing changed."""
        ...

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` share or copy a range of `src`."""
        ...

    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences of the same stream."""
        ...

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move a range of positions by `delta`."""
        ...

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide a range of positions by `d`."""
        ...

    def pos_min(self, seq_id: int) -> int:
        """Smallest stored position, -1 if the sequence is empty."""
        ...

    def pos_max(self, seq_id: int) -> int:
        """Largest stored position, -1 if the sequence is empty."""
        ...

    def can_shift(self) -> ShiftSupport:
        """Whether positions can be moved, and if not, why."""
        ...

    def cells(self, stream: int = 0) -> CellsView:
        """What the cells of one stream hold now."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers."""
        ...

    def close(self) -> None:
        """Free the buffers."""
        ...
