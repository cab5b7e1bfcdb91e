"""RecurrentContext: the plan for one batch in a recurrent memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pykv.batch import UBatch
from pykv.cells import RecurrentSlot
from pykv.errors import PykvError
from pykv.memory.recurrent_graph import StateShape
from pykv.memory.state_snapshot import KeptStates

if TYPE_CHECKING:
    from pykv.memory.recurrent import RecurrentMemory


class RecurrentContext:
    """The plan for one batch in a recurrent memory.

    Attributes
    ----------
    ubatches, slots : in order, one slot per ubatch.
    """

    def __init__(self, memory: RecurrentMemory, ubatches: Sequence[UBatch], slots: Sequence[RecurrentSlot]) -> None:
        self._memory, self.ubatches, self.slots = memory, ubatches, slots
        self._moved = KeptStates(memory, ())

    def apply(self, i: int) -> StateShape:
        """Move the sequences of ubatch `i` behind it; returns what the graph must look like.

        Raises
        ------
        ParamError : something has changed since the slot was found.
        """
        slot = self.slots[i]
        # moved layer by layer, a state that is not the ubatch's would be in two halves if the computation stopped
        moved = KeptStates(self._memory, slot.rows_moved())
        self._memory.states.apply(slot)
        self._moved = moved
        return StateShape(self.ubatches[i].n_tokens, slot.n_seqs, slot.n - slot.n_seqs, slot.rs_z >= 0)

    def retract(self, i: int, *, touched: bool = True) -> tuple[int, ...]:
        """Take ubatch `i`, applied last, out again. Returns the sequences that are lost, none unless `touched`."""
        kept: tuple[int, ...] = ()
        if touched:
            with suppress(PykvError):  # of a device that is gone: then these are lost as well
                self._moved.put_back()
                kept = self._moved.rows
        return self._memory.states.retract(self.slots[i], touched=touched, kept=kept)
