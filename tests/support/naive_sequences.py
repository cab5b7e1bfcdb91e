"""What each sequence holds, as plain lists: the memory a program believes it has, with no cells in it.

A token that several sequences share is one object; whoever moves it gets an object of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]


@dataclass(eq=False)
class Held:
    """One stored token."""

    pos: int
    token: int


class NaiveSequences:
    """Sequences over `n_cells` tokens in all, or each over as many of its own."""

    def __init__(self, n_seq: int, n_cells: int, unified: bool = True) -> None:
        self.held: list[list[Held]] = [[] for _ in range(n_seq)]
        self.n_cells, self.unified = n_cells, unified

    def n_free(self, seq: int) -> int:
        """Tokens that still fit."""
        mine = self.held if self.unified else [self.held[seq]]
        return self.n_cells - len({id(one) for rows in mine for one in rows})

    def store(self, seq: int, pos: int, token: int) -> None:
        """Add a token to one sequence."""
        self.held[seq].append(Held(pos, token))

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range from one sequence, or from all with -1."""
        for s in range(len(self.held)) if seq == -1 else [seq]:
            self.held[s] = [one for one in self.held[s] if not inside(one, p0, p1)]

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> bool:
        """Let `dst` have a range too; False if there is no room."""
        copied = [one for one in self.held[src] if inside(one, p0, p1)]
        if self.unified or src == dst:
            self.held[dst] += [one for one in copied if one not in self.held[dst]]
            return True
        kept = [one for one in self.held[dst] if not inside(one, p0, p1)]
        if len(kept) + len(copied) > self.n_cells:
            return False
        self.held[dst] = kept + [Held(one.pos, one.token) for one in copied]
        return True

    def seq_keep(self, seq: int) -> None:
        """Empty all other sequences, or none where each has cells of its own."""
        if self.unified:
            self.held = [rows if s == seq else [] for s, rows in enumerate(self.held)]

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        """Move a range; what falls below 0 goes. False if shared tokens find no room for a copy."""
        return self._moved(seq, p0, p1, lambda p: p + delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool:
        """Divide the positions of a range, rounding down; False as in `seq_add`."""
        return self._moved(seq, p0, p1, lambda p: p // d)

    def rows(self, seq: int) -> list[tuple[int, int]]:
        """Return (position, token), sorted."""
        return sorted((one.pos, one.token) for one in self.held[seq])

    def _moved(self, seq: int, p0: int, p1: int, to) -> bool:
        others = [one for s, rows in enumerate(self.held) if s != seq for one in rows]
        moving = [one for one in self.held[seq] if inside(one, p0, p1) and to(one.pos) != one.pos]
        copied = [one for one in moving if one in others and to(one.pos) >= 0]
        if len(copied) > self.n_free(seq):
            return False
        stay = [one for one in self.held[seq] if one not in moving]
        self.held[seq] = stay + [Held(to(one.pos), one.token) for one in moving if to(one.pos) >= 0]
        return True


def inside(one: Held, p0: int, p1: int) -> bool:
    """Tell whether a token lies in a range, whose ends may be open: negative."""
    return max(p0, 0) <= one.pos and (p1 < 0 or one.pos < p1)
