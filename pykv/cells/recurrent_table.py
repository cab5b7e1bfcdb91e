"""RecurrentTable: who has a recurrent state, where its row lies, and how far back it can go.

There are no more cells than sequences, so plain lists serve: a step touches few of them, and a copy costs less than
one numpy call. Source: spec iswa_recurrent_hybrid.md 2.1; follows llama.cpp's ``llama_memory_recurrent``.

    row of the state of s     plane[s] * n + tail[s]
    plane 0                   the state now; plane d of the same cell, if it is valid, the state d tokens earlier
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pykv.typing import NO_POS

NO_CELL = -1
NO_SOURCE = -1


class RecurrentTable:
    """The bookkeeping of `n` cells and `n_seq_max` sequences.

    Attributes
    ----------
    owners : per cell, its sequences ascending; empty = free.
    src : per cell, the cell whose row holds its state, -1 = none, so that it begins with zeros. Between two ubatches
        that is the cell itself; a free cell that points to itself has a row of zeros.
    tail : per sequence, its cell, -1 = none.
    plane : per sequence, the plane that holds its state; above 0 from a rollback until its next token.
    trail : per sequence, the position that it has in each plane from `plane` on: its own position, then those that it
        can go back to, never ascending. Only its own while `plane` is above 0: a rollback is not stacked on another.
    head : the cell where the next search starts; a hint.
    used : cells with an owner.
    """

    # differs from llama.cpp: a cell has no position; there, one that is shared goes back or is moved for all its
    # sequences, though only one of them was meant

    def __init__(self, n: int, n_seq_max: int) -> None:
        self.n = n
        self.owners: list[tuple[int, ...]] = [()] * n
        self.src = [NO_SOURCE] * n
        self.tail = [NO_CELL] * n_seq_max
        self.plane = [0] * n_seq_max
        self.trail: list[tuple[int, ...]] = [()] * n_seq_max
        self.head = 0
        self.used = 0

    def copy(self) -> RecurrentTable:
        """Return a table that changes apart from this one."""
        twin = RecurrentTable.__new__(RecurrentTable)
        twin.n, twin.head, twin.used = self.n, self.head, self.used
        twin.owners, twin.src = self.owners.copy(), self.src.copy()
        twin.tail, twin.plane, twin.trail = self.tail.copy(), self.plane.copy(), self.trail.copy()
        return twin

    # questions

    def pos(self, s: int) -> int:
        """Return the position of a sequence, -1 without a state."""
        trail = self.trail[s]
        return trail[0] if trail else NO_POS

    def steps_back(self, s: int, p: int) -> int | None:
        """Return how many planes a sequence goes back to be rid of all from `p` on; None if none is so old."""
        return next((d for d, last in enumerate(self.trail[s]) if last < p), None)

    def free_cell(self, start: int) -> int:
        """Return the first free cell from `start` on, around the ring."""
        n, owners = self.n, self.owners
        # a sequence that needs a cell shares one or has none, and there are as many cells as sequences
        return next(c for c in (i % n for i in range(start, start + n)) if not owners[c])

    # changes

    def join(self, s: int, cell: int) -> None:
        """Let a sequence without a cell own this one; the caller sets its plane and trail."""
        old = self.owners[cell]
        self.used += not old
        self.owners[cell] = tuple(sorted((*old, s))) if old else (s,)
        self.tail[s] = cell

    def part(self, s: int, cell: int) -> None:
        """Let a sequence go from the cell it shares, if any, to a free one, whose row is yet to be filled."""
        old = self.tail[s]
        if old != NO_CELL:
            self.owners[old] = tuple(o for o in self.owners[old] if o != s)
            self.src[cell] = self.src[old]
        self.join(s, cell)

    def drop(self, s: int) -> int | None:
        """Take a sequence out of its cell, if it has one. Returns the cell if that is free now."""
        cell = self.tail[s]
        if cell == NO_CELL:
            return None
        self.tail[s], self.plane[s], self.trail[s] = NO_CELL, 0, ()
        self.owners[cell] = rest = tuple(o for o in self.owners[cell] if o != s)
        if rest:
            return None
        self.src[cell] = NO_SOURCE
        self.used -= 1
        return cell

    def swap(self, a: int, b: int) -> None:
        """Let two cells change places; their rows follow from `src`."""
        self.owners[a], self.owners[b] = self.owners[b], self.owners[a]
        self.src[a], self.src[b] = self.src[b], self.src[a]
        for cell in (a, b):
            for s in self.owners[cell]:
                self.tail[s] = cell

    def check(self, n_rs_seq: int) -> None:
        """Verify every invariant that holds between two ubatches; raises AssertionError."""
        used = sum(map(bool, self.owners))
        assert self.used == used, f"used is {self.used}, {used} cells have owners"
        assert 0 <= self.head < self.n, f"head {self.head} is outside 0 to {self.n - 1}"
        for cell, ids in enumerate(self.owners):
            src, allowed = self.src[cell], (cell,) if ids else (NO_SOURCE, cell)
            assert src in allowed, f"cell {cell}: src is {src}, allowed are {allowed}"
            assert list(ids) == sorted(set(ids)), f"cell {cell}: owners {ids} are not distinct and ascending"
            strays = [s for s in ids if self.tail[s] != cell]
            assert not strays, f"cell {cell}: sequences {strays} have tails elsewhere"
        for s, cell in enumerate(self.tail):
            trail, plane = self.trail[s], self.plane[s]
            if cell == NO_CELL:
                assert (plane, trail) == (0, ()), f"sequence {s}: plane {plane}, trail {trail}, but no cell"
                continue
            assert s in self.owners[cell], f"sequence {s}: cell {cell} belongs to {self.owners[cell]}"
            assert 1 <= len(trail) <= n_rs_seq + 1 - plane, f"sequence {s}: trail {trail}, plane {plane}"
            assert plane == 0 or len(trail) == 1, f"sequence {s}: could go back twice, {trail} from plane {plane}"
            assert min(trail) >= 0, f"sequence {s}: negative position in {trail}"
            assert all(a >= b for a, b in pairwise(trail)), f"sequence {s}: ascending positions in {trail}"


def in_order(trail: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of a trail as far as one can go back by them: down, and not below 0."""
    if len(trail) > 1:
        n = next((d for d in range(1, len(trail)) if trail[d] > trail[d - 1] or trail[d] < 0), len(trail))
        return tuple(trail[:n])
    return tuple(trail)
