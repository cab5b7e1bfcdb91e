"""Recurrent states of sequences, and the ubatches that go through them.

`RecurrentCells` adds what is done to sequences. Source: spec iswa_recurrent_hybrid.md 2.3 to 2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from pykv.batch.ubatch import UBatch
from pykv.cells.arguments import integer, sequence_id
from pykv.cells.recurrent_slot import RecurrentSlot, find_recurrent_slot
from pykv.cells.recurrent_table import NO_CELL, NO_SOURCE, RecurrentTable
from pykv.cells.recurrent_view import RecurrentView
from pykv.errors import ParamError
from pykv.typing import MAX_SEQ, POS_INF, I64Array


class RecurrentStates:
    """The states of one recurrent memory.

    Attributes
    ----------
    n_cells : rows of one plane.
    n_seq_max : sequences that are told apart; each finds a cell at any time.
    n_rs_seq : planes of snapshots behind plane 0, and so the most tokens that a sequence can be taken back by.
    n_changes : goes up with every change, so that a plan can tell whether it is still good.

    Parameters
    ----------
    reference_moves : move positions as llama.cpp does: a shared state for all its owners.
    """

    def __init__(self, n_cells: int, n_seq_max: int = 1, n_rs_seq: int = 0, *, reference_moves: bool = False) -> None:
        self.n_seq_max = integer("n_seq_max", n_seq_max, 1, MAX_SEQ)
        self.n_cells = integer("n_cells", n_cells, self.n_seq_max, POS_INF)
        self.n_rs_seq = integer("n_rs_seq", n_rs_seq, 0, POS_INF)
        self.n_changes = 0
        self._reference_moves = reference_moves
        self._table = RecurrentTable(self.n_cells, self.n_seq_max)

    # ubatches

    def find_slot(self, ubatch: UBatch) -> RecurrentSlot:
        """Find cells for a ubatch of sets of equal length; they always fit. Changes nothing."""
        return find_recurrent_slot(self._table, ubatch, self.n_rs_seq, self.n_changes)

    def prepare(self, ubatches: Sequence[UBatch]) -> list[RecurrentSlot]:
        """Find slots for ubatches that will be applied one after the other. Changes nothing."""
        slots: list[RecurrentSlot] = []
        table = self._table
        for i, ubatch in enumerate(ubatches):
            slots.append(find_recurrent_slot(table, ubatch, self.n_rs_seq, self.n_changes + i))
            table = slots[-1].after
        return slots

    def apply(self, slot: RecurrentSlot) -> None:
        """Move the sequences of a ubatch behind it, and resolve what was pending for the rows that are read.

        Raises
        ------
        ParamError
            If something has changed since the slot was found; nothing has changed now.
        """
        if slot.n_changes != self.n_changes or slot.before is not self._table:
            raise ParamError("slot: the cells have changed since it was found; find it anew")
        self.n_changes += 1
        self._table = slot.after

    def retract(self, slot: RecurrentSlot, *, touched: bool = True, kept: Collection[int] = ()) -> tuple[int, ...]:
        """Take back the slot that was applied last, because its states could not be computed.

        With `touched` rows may have been written, and a state that was overwritten cannot be had again: every
        sequence is afterwards as before the ubatch, or gone. Gone are those whose state was in a cell of the run:
        those of the ubatch, unless they had just left a shared cell, and those that were moved to make room. A
        caller that has put ``slot.rows_at_risk`` back, or never begun to compute, says ``touched=False`` and
        loses nothing; one that has put the rows `kept` back loses nobody who reads those, but what they could go
        back to.

        Returns
        -------
        The sequences that are gone.

        Raises
        ------
        ParamError
            If the slot was not applied, or something has changed since; nothing has changed now.
        """
        # differs from llama.cpp: there the sequences keep their new position, and a state that is neither old nor new
        if slot.after is not self._table or slot.n_changes + 1 != self.n_changes:
            raise ParamError("slot: is not what changed the cells last")
        self.n_changes += 1
        self._table = table = slot.before.copy()
        if not touched:
            return ()
        hit = [s for s, c in enumerate(table.tail) if c != NO_CELL and not slot.spares(c, table.plane[s])]
        lost = [s for s in hit if table.plane[s] * table.n + table.tail[s] not in kept]
        for s in hit:
            table.trail[s] = table.trail[s][:1]
        for s in lost:
            table.drop(s)
        for cell in range(slot.head, slot.head + slot.n):
            if not table.owners[cell]:
                table.src[cell] = NO_SOURCE  # its zeros may be gone
        return tuple(lost)

    def bookmark(self) -> Callable[[], None]:
        """Return what puts the bookkeeping back to what it is now; rows do not come back."""
        kept = self._table.copy()

        def undo() -> None:
            self.n_changes += 1
            self._table = kept.copy()

        return undo

    # questions

    def pos_min(self, seq_id: int) -> int:
        """Return the position of a sequence, -1 if it is empty: a state has no other."""
        return self._table.pos(self._seq(seq_id))

    def pos_max(self, seq_id: int) -> int:
        """Return the position of a sequence, -1 if it is empty."""
        return self._table.pos(self._seq(seq_id))

    def why_not_resumable(self, seq_id: int, p: int) -> tuple[str, int] | None:
        """Say why decoding cannot continue at `p`, once all from there on is removed; None if it can.

        Returns
        -------
        The reason as one word, and the largest position up to `p` that may: "missing", a token before `p` is not in
        the state; "state_gone", the token at `p` is, and no snapshot is left without it; "rollback_pending", the
        sequence has been taken back since its last token and cannot be once more.

        Source: spec session.md 5.5.
        """
        seq_id, p = self._seq(seq_id), integer("p", p, 0, POS_INF)
        table = self._table
        end = table.pos(seq_id) + 1
        if p > end:
            return "missing", end
        if p in (0, end) or table.steps_back(seq_id, p) is not None:
            return None
        return ("rollback_pending" if table.plane[seq_id] else "state_gone"), 0

    def resume_points(self, seq_id: int, p: int) -> I64Array:
        """Return at which positions up to `p` decoding may go on, always at 0: (k, 2), first and last of each run."""
        seq_id, p = self._seq(seq_id), integer("p", p, 0, POS_INF)
        trail = self._table.trail[seq_id]
        runs = [[0, 0]]
        if trail and trail[-1] < p:
            runs.append([trail[-1] + 1, min(trail[0] + 1, p)])
        return np.array([[0, runs[-1][1]]] if runs[-1][0] == 1 else runs)

    def row(self, seq_id: int) -> int | None:
        """Return the row that holds the state of a sequence, ``plane * n_cells + cell``; None if it is empty."""
        s = self._seq(seq_id)
        cell = self._table.tail[s]
        return None if cell == NO_CELL else self._table.plane[s] * self.n_cells + cell

    def view(self) -> RecurrentView:
        """Return the cells to look at; it follows every change."""
        return RecurrentView(self)

    @property
    def table(self) -> RecurrentTable:
        """The bookkeeping as it is now, to be read only."""
        return self._table

    def check(self) -> None:
        """Verify every invariant from scratch; raises AssertionError."""
        self._table.check(self.n_rs_seq)

    def dump(self) -> str:
        """Return the cells up to the last used one, as `RecurrentView.words` has them."""
        return " ".join(self.view().words())

    # mechanism

    def _seq(self, seq_id: int) -> int:
        return sequence_id("seq_id", seq_id, self.n_seq_max)
