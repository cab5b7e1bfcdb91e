"""RecurrentCells: all bookkeeping of one recurrent memory, with the sequence verbs.

A sequence has one state, which stands for all its tokens: it can be shared, dropped, and taken back by as many
tokens as it left snapshots for. Holds no tensors: which rows are read and written is said by the slots. Source: spec
iswa_recurrent_hybrid.md 2.2; follows llama.cpp's ``llama_memory_recurrent``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pykv.cells.arguments import integer, sequence_id
from pykv.cells.ranges import clip_range
from pykv.cells.recurrent_states import RecurrentStates
from pykv.cells.recurrent_table import NO_CELL, NO_SOURCE, RecurrentTable, in_order
from pykv.errors import ParamError
from pykv.typing import POS_INF, as_int


class RecurrentCells(RecurrentStates):
    """The states of one recurrent memory and what can be done to sequences.

    Each verb refuses a sequence with SequenceError, another argument with ParamError, before it begins.
    """

    def clear(self) -> None:
        """Empty every cell."""
        self.n_changes += 1
        self._table = RecurrentTable(self.n_cells, self.n_seq_max)

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions ``[p0, p1)`` of a sequence, of all if ``seq_id == -1``. Returns False if it cannot be.

        A range that does not hold the newest token changes nothing, although it is forgotten only with the whole
        state. One that does takes the state back, once until the next token, to where a snapshot was left; from 0 on
        it drops the state. If any of several sequences cannot go back, none does.
        """
        p0, p1 = clip_range(p0, p1)
        # differs from llama.cpp: -1 is every sequence here (there: an error), as in every other memory
        seqs = range(self.n_seq_max) if as_int(seq_id) == -1 else [self._seq(seq_id)]
        table = self._table
        hit = [s for s in seqs if p0 <= table.pos(s) < p1]  # a sequence without a state is at -1
        if p0 == 0:
            self._drop(hit)
            return True
        # differs from llama.cpp: planes are counted from the positions that they hold (there: from the difference of
        # positions, whether or not a plane was written since), so a state that is not there is never promised
        steps = {s: table.steps_back(s, p0) for s in hit}
        if None in steps.values():
            return False
        for s, back in steps.items():
            self.n_changes += 1
            self._go_back(s, s, back or 0)
        return True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let `dst` become what `src` is at `p1`: the same state, shared until one of them gets a token.

        A state begins at its first token whatever `p0` is. A range without any position up to that of `src` changes
        nothing. One that ends before the newest token needs a snapshot.

        Raises
        ------
        ParamError
            If `src` has no snapshot of its state at `p1`; nothing has changed.
        """
        src, dst = sequence_id("src", src, self.n_seq_max), sequence_id("dst", dst, self.n_seq_max)
        p0, p1 = clip_range(p0, p1)
        table = self._table
        pos = table.pos(src)
        if src == dst or p0 >= p1 or p0 > max(pos, 0):
            return
        # differs from llama.cpp: a range that ends earlier is not ignored, because dst would get tokens not meant
        back = table.steps_back(src, p1)
        if back is None and pos >= 0:
            raise ParamError(f"p1 = {p1}: sequence {src} ends at {pos}, and its state before {p1} is not kept")
        self.n_changes += 1
        table.drop(dst)
        if back is not None:
            table.join(dst, table.tail[src])
            # differs from llama.cpp: the plane is copied too, because dst is to read what src would
            self._go_back(src, dst, back)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other sequence."""
        seq_id, table = self._seq(seq_id), self._table
        self.n_changes += 1
        for s in range(self.n_seq_max):
            if s != seq_id:
                table.drop(s)
        table.src = [c if c == table.tail[seq_id] else NO_SOURCE for c in range(table.n)]
        first = next((c for c in range(table.n) if not table.owners[c]), table.n)  # also one that was free before
        table.head = min(table.head, first)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move the sequence by `delta` if it stands in ``[p0, p1)``; one that falls below 0 is removed.

        The state stays as it is. Positions of snapshots move if they are in the range.

        Raises
        ------
        ParamError
            If `delta` is no such integer, or the position would pass the largest one.
        """
        seq_id = self._seq(seq_id)
        p0, p1 = clip_range(p0, p1)
        delta = integer("delta", delta, -POS_INF, POS_INF)
        for s in self._moving(seq_id):
            last = max((p for p in self._table.trail[s] if p0 <= p < p1), default=-POS_INF) + delta
            if last >= POS_INF:
                raise ParamError(f"delta = {delta}: position {last} would pass the limit {POS_INF - 1}")
        if delta:
            self._move(seq_id, p0, p1, lambda p: p + delta)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the position of the sequence by `d` >= 1, rounding down, if it stands in ``[p0, p1)``.

        Raises
        ------
        ParamError
            If `d` is not an integer from 1 to the largest position.
        """
        seq_id = self._seq(seq_id)
        p0, p1 = clip_range(p0, p1)
        d = integer("d", d, 1, POS_INF)
        if d > 1:
            self._move(seq_id, p0, p1, lambda p: p // d)

    # restoring

    def place(self, seq_id: int, pos: int) -> int:
        """Give a sequence a cell of its own for a state at `pos` that the caller writes. Returns the row to write."""
        seq_id, pos = self._seq(seq_id), integer("pos", pos, 0, POS_INF - 1)
        self.n_changes += 1
        self._drop([seq_id])
        table = self._table
        if table.head > table.used + 2:
            table.head = 0
        cell = table.free_cell(table.head)
        table.join(seq_id, cell)
        table.trail[seq_id], table.src[cell], table.head = (pos,), cell, cell
        return cell

    def place_all(self, states: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Let cells hold the states at these positions, each of these sequences, from the first cell on, and no others.

        The caller writes the rows, of plane 0. No sequence may be named twice.
        """
        self.clear()
        table = self._table
        for cell, (pos, seqs) in enumerate(states):
            trail = (integer("pos", pos, 0, POS_INF - 1),)
            for s in map(self._seq, seqs):
                assert table.tail[s] == NO_CELL, f"sequence {s} has two states"
                table.join(s, cell)
                table.trail[s] = trail
            table.src[cell] = cell

    # mechanism

    def _go_back(self, src: int, dst: int, back: int) -> None:
        """Let `dst` read the state of `src`, `back` planes earlier."""
        table = self._table
        trail = table.trail[src]
        table.plane[dst] = table.plane[src] + back
        table.trail[dst] = trail if table.plane[dst] == 0 else (trail[back],)

    def _drop(self, seqs: Iterable[int]) -> None:
        """Remove sequences; the next search starts at the first cell that became free."""
        for s in seqs:
            self.n_changes += 1
            cell = self._table.drop(s)
            if cell is not None:
                self._table.head = min(self._table.head, cell)

    def _moving(self, seq_id: int) -> tuple[int, ...]:
        cell = self._table.tail[seq_id]
        return self._table.owners[cell] if self._reference_moves and cell != NO_CELL else (seq_id,)

    def _move(self, seq_id: int, p0: int, p1: int, to: Callable[[int], int]) -> None:
        """Move the positions in a range of a sequence, its own and those of its snapshots."""
        # differs from llama.cpp: one that falls below 0 is removed (there: stays, and its cell counts as empty)
        for s in self._moving(seq_id):
            trail = self._table.trail[s]
            moved = [to(p) if p0 <= p < p1 else p for p in trail]
            if moved == list(trail):
                continue
            self.n_changes += 1
            if moved[0] < 0:
                self._drop([s])
            else:
                self._table.trail[s] = in_order(moved)
