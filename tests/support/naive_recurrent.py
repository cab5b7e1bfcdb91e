"""Recurrent states the plain way: cells, the search, and rows that hold the tokens that went into them.

`NaiveRecurrent` is the specification written down (iswa_recurrent_hybrid.md 2.2 and 2.4), one rule a line, without
what pykv does differently. `Rows` does what a graph would do with the rows, so that a state that was not copied, or
copied from the wrong place, shows as a wrong history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pykv.cells import RecurrentSlot

GARBAGE = ("garbage",)
INF = 2**31 - 1


@dataclass
class NaiveCell:
    """One cell; `tail` is that of the sequence with the cell's number."""

    pos: int = -1
    src: int = -1
    src0: int = -1
    tail: int = -1
    ids: set[int] = field(default_factory=set)


class NaiveRecurrent:
    """Cells and verbs as the specification has them."""

    def __init__(self, size: int, n_rs_seq: int = 0) -> None:
        self.size, self.n_rs_seq = size, n_rs_seq
        self.cells = [NaiveCell() for _ in range(size)]
        self.rs_idx = [0] * size
        self.head = self.used = self.n = 0
        self.rs_z = -1

    # verbs

    def clear(self) -> None:
        for cell in self.cells:
            cell.pos = cell.src = cell.tail = -1
            cell.ids = set()
        self.head = self.used = 0
        self.rs_idx = [0] * self.size

    def free(self, cell: NaiveCell) -> None:
        cell.pos = cell.src = -1
        self.used -= 1

    def seq_rm(self, s: int, p0: int, p1: int) -> bool:
        p0, p1 = max(p0, 0), INF if p1 < 0 else p1
        if p0 == 0 and p1 == INF:
            self.rs_idx[s] = 0
        if self.cells[s].tail >= 0:
            tail = self.cells[self.cells[s].tail]
            if 0 < p0 <= tail.pos < p1:
                back = tail.pos - (p0 - 1)
                if self.rs_idx[s] or not 1 <= back <= self.n_rs_seq:
                    return False
                self.rs_idx[s], tail.pos = back, p0 - 1
                return True
            if p0 <= tail.pos < p1:
                self.cells[s].tail = -1
        first = None
        for i, cell in enumerate(self.cells):
            if p0 <= cell.pos < p1 and s in cell.ids:
                cell.ids.remove(s)
                if not cell.ids:
                    self.free(cell)
                    first = i if first is None else first
        if first is not None:
            self.head = min(self.head, first)
        return True

    def leave(self, s: int) -> None:
        """Take a sequence out of its cell, which is freed if nobody else has it."""
        if self.cells[s].tail >= 0:
            cell = self.cells[self.cells[s].tail]
            cell.ids.remove(s)
            self.cells[s].tail = -1
            if not cell.ids:
                self.free(cell)

    def seq_cp(self, src: int, dst: int) -> None:
        if src == dst:
            return
        self.leave(dst)
        tail = self.cells[src].tail
        if tail >= 0:
            self.cells[tail].ids.add(dst)
            self.cells[dst].tail = tail

    def seq_keep(self, s: int) -> None:
        first = None
        for i, cell in enumerate(self.cells):
            if i != s:
                cell.tail = -1
            if s in cell.ids:
                cell.ids = {s}
                continue
            if cell.pos >= 0:
                self.used -= 1
            cell.pos = cell.src = -1
            cell.ids = set()
            first = i if first is None else first  # llama.cpp counts cells that were empty before, too
        if first is not None:
            self.head = min(self.head, first)

    def seq_add(self, s: int, p0: int, p1: int, d: int) -> None:
        tail = self.cells[s].tail
        if tail >= 0 and max(p0, 0) <= self.cells[tail].pos < (INF if p1 < 0 else p1):
            self.cells[tail].pos += d

    def pos_max(self, s: int) -> int:
        return max((cell.pos for cell in self.cells if s in cell.ids), default=-1)

    # the search

    def find_slot(self, sets: Sequence[tuple[int, ...]], last: Sequence[int]) -> bool:
        """Assign cells to sets of sequences whose last positions are `last`."""
        cells, size = self.cells, self.size
        if self.head > self.used + 2 * len(sets):
            self.head = 0
        for ids in sets:
            for s in ids[1:]:
                self.leave(s)
        low, high = size - 1, 0
        empty = self.next_empty(self.head)
        for k, (q, *_) in enumerate(sets):
            tail = cells[q].tail
            if tail < 0 or cells[tail].ids != {q}:
                if tail >= 0:
                    cells[empty].pos, cells[empty].src = cells[tail].pos, cells[tail].src
                    cells[tail].ids.remove(q)
                    cells[empty].ids.add(q)
                cells[q].tail = empty
                if k + 1 < len(sets):
                    empty = self.next_empty(empty + 1)
            low, high = min(low, cells[q].tail), max(high, cells[q].tail)
        for k, (q, *_) in enumerate(sets):
            self.exchange(cells[q].tail, low + k)
        for k, ids in enumerate(sets):
            cells[low + k].pos, cells[low + k].ids = last[k], set(ids)
            for s in ids:
                cells[s].tail = low + k
        sources = [cell.src for cell in cells]
        self.rs_z = next((c for c in range(low, high + 1) if c not in sources), -1)
        for c in range(low, high + 1):
            cells[c].src0 = self.rs_z if cells[c].src < 0 else cells[c].src
            cells[c].src = c
        self.head, self.n = low, high - low + 1
        self.used = sum(bool(cell.ids) for cell in cells)
        return self.n >= len(sets)

    def next_empty(self, start: int) -> int:
        for c in range(start, start + self.size):
            if not self.cells[c % self.size].ids:
                return c % self.size
        return start % self.size

    def exchange(self, a: int, b: int) -> None:
        if a == b:
            return
        x, y = self.cells[a], self.cells[b]
        x.pos, y.pos, x.src, y.src, x.ids, y.ids = y.pos, x.pos, y.src, x.src, y.ids, x.ids
        for cell in self.cells:
            cell.tail = {a: b, b: a}.get(cell.tail, cell.tail)

    def s_copy(self) -> list[int]:
        """Return the rows to read; as in llama.cpp, asking resolves what is pending."""
        rows = []
        for cell in self.cells[self.head : self.head + self.n]:
            plane = 0
            if cell.ids and self.n_rs_seq:
                plane, self.rs_idx[min(cell.ids)] = self.rs_idx[min(cell.ids)], 0
            rows.append(plane * self.size + cell.src0)
        return rows


class Rows:
    """The rows of all planes, each the tokens of one history; what a graph does to them."""

    def __init__(self, n_cells: int, n_rs_seq: int) -> None:
        self.n_cells, self.n_planes = n_cells, n_rs_seq + 1
        self.rows: list[tuple[object, ...]] = [GARBAGE] * (n_cells * self.n_planes)
        self.written: set[int] = set()

    def compute(self, slot: RecurrentSlot, tokens: Sequence[Sequence[int]]) -> None:
        """Let each set of the ubatch read its state and write what its tokens make of it.

        `written` is then the rows of which not all were left as they are.
        """
        rows, head, n_seqs, source = self.rows, slot.head, slot.n_seqs, slot.s_copy.tolist()
        self.written = set()
        if slot.rs_z >= 0:
            self.write(slot.rs_z, ())
        states = [rows[row] for row in source]
        for i in range(n_seqs, slot.n):
            if source[i] != head + i:
                self.write(head + i, states[i])
        for i, new in enumerate(tokens):
            for plane in range(self.n_planes):  # some models write every plane, whatever the number of tokens
                n = len(new) - plane
                state = (*states[i], *new[:n]) if n > 0 else GARBAGE
                self.write(plane * self.n_cells + head + i, state)

    def write(self, row: int, state: tuple[object, ...]) -> None:
        self.rows[row] = state
        self.written.add(row)
