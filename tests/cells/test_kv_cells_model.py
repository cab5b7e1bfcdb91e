"""One stream against the plain-Python model, over random operations."""

from __future__ import annotations

import copy

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.naive_cells import NaiveCells

from pykv.cells import KVCells
from pykv.cells.kv_cells import CellSnapshot

SEQS = st.integers(0, 3)
PICK = st.lists(st.integers(0, 9), unique=True, max_size=6)


class CellOperations(RuleBasedStateMachine):
    """Each rule narrows random cells down to those that its precondition allows."""

    @initialize(n=st.integers(1, 10))
    def start(self, n: int) -> None:
        self.cells, self.naive = KVCells(n), NaiveCells(n)
        self.saved: list[tuple[list[int], CellSnapshot, list[tuple[int, int, tuple[int, int, int], set[int]]]]] = []

    def within(self, pick: list[int], occupied: bool) -> list[int]:
        return [i for i in pick if i < self.naive.n and self.naive.empty(i) != occupied]

    @rule(pick=PICK, p=st.integers(0, 12), step=st.integers(0, 2))
    def pos_set(self, pick: list[int], p: int, step: int) -> None:
        idxs = self.within(pick, occupied=False)
        pos = [p + step * k for k in range(len(idxs))]
        self.cells.pos_set(np.array(idxs, np.int64), np.array(pos, np.int32))
        for i, q in zip(idxs, pos, strict=True):
            self.naive.pos_set(i, q)

    @rule(pick=PICK, x=st.integers(0, 3), tok=st.integers(0, 9))
    def ext_set(self, pick: list[int], x: int, tok: int) -> None:
        idxs = self.within(pick, occupied=True)
        self.cells.ext_set(idxs, x, 2 * x, tok)
        for i in idxs:
            self.naive.ext_set(i, (x, 2 * x, tok))

    @rule(pick=PICK, s=SEQS)
    def seq_add(self, pick: list[int], s: int) -> None:
        idxs = [i for i in self.within(pick, occupied=True) if s not in self.naive.seq[i]]
        self.cells.seq_add(idxs, s)
        for i in idxs:
            self.naive.seq_add(i, s)

    @rule(pick=PICK, p=st.integers(0, 12), ids=st.lists(st.sets(SEQS, min_size=1), min_size=6, max_size=6))
    def store(self, pick: list[int], p: int, ids: list[set[int]]) -> None:
        idxs = self.within(pick, occupied=False)
        if not idxs:
            return
        seq_ids = tuple(tuple(sorted(group)) for group in ids[: len(idxs)])
        self.cells.store(np.array(idxs), np.arange(p, p + len(idxs), dtype=np.int32), seq_ids)
        for k, i in enumerate(idxs):
            self.naive.pos_set(i, p + k)
            for s in seq_ids[k]:
                self.naive.seq_add(i, s)

    @rule(pick=PICK, s=SEQS)
    def seq_rm(self, pick: list[int], s: int) -> None:
        idxs = [i for i in self.within(pick, occupied=True) if s in self.naive.seq[i]]
        assert self.cells.seq_rm(idxs, s).tolist() == [self.naive.seq_rm(i, s) for i in idxs]

    @rule(pick=PICK, s=SEQS)
    def seq_keep(self, pick: list[int], s: int) -> None:
        idxs = [i for i in pick if i < self.naive.n]
        assert self.cells.seq_keep(idxs, s).tolist() == [self.naive.seq_keep(i, s) for i in idxs]

    @rule(pick=PICK)
    def rm(self, pick: list[int]) -> None:
        idxs = self.within(pick, occupied=True)
        self.cells.rm(idxs)
        for i in idxs:
            self.naive.rm(i)

    @rule(pick=PICK, d=st.integers(-8, 5))
    def pos_add(self, pick: list[int], d: int) -> None:
        idxs = self.within(pick, occupied=True)
        assert self.cells.pos_add(idxs, d).tolist() == [self.naive.pos_add(i, d) for i in idxs]

    @rule(pick=PICK, d=st.integers(1, 3))
    def pos_div(self, pick: list[int], d: int) -> None:
        idxs = self.within(pick, occupied=True)
        self.cells.pos_div(idxs, d)
        for i in idxs:
            self.naive.pos_div(i, d)

    @rule()
    def reset_shift(self) -> None:
        self.cells.reset_shift()
        self.naive.reset_shift()

    @rule(pick=PICK)
    def snapshot(self, pick: list[int]) -> None:
        idxs = [i for i in pick if i < self.naive.n]
        n = self.naive
        held = [(n.pos[i], n.shift[i], n.ext[i], set(n.seq[i])) for i in idxs]
        self.saved.append((idxs, self.cells.snapshot(idxs), held))

    @rule(back=st.integers(0, 3))
    def restore(self, back: int) -> None:
        if back >= len(self.saved):
            return
        idxs, snap, held = self.saved[-1 - back]
        self.cells.restore(idxs, snap)
        n = self.naive
        for i, (pos, shift, ext, seq) in zip(idxs, held, strict=True):
            n.pos[i], n.shift[i], n.ext[i], n.seq[i] = pos, shift, ext, set(seq)
            n.has_shift |= shift != 0

    @rule(s=st.none() | SEQS, p0=st.integers(0, 14), p1=st.integers(0, 14))
    def find(self, s: int | None, p0: int, p1: int) -> None:
        n = self.naive
        hit = [i for i in n.used() if p0 <= n.pos[i] < p1 and (s is None or s in n.seq[i])]
        assert self.cells.find(s, p0, p1).tolist() == hit

    @rule(s=SEQS, ps=st.lists(st.integers(0, 14), min_size=1, max_size=5))
    def tokens(self, s: int, ps: list[int]) -> None:
        assert self.cells.tokens_le(s, np.array(ps)).tolist() == [self.naive.seq_pos_tok_le(s, p) for p in ps]

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "cells"):
            return
        c, n = self.cells, self.naive
        assert c.pos.tolist() == n.pos
        assert c.shift.tolist() == n.shift
        ext = zip(c.ext_x.tolist(), c.ext_y.tolist(), c.ext_tok.tolist(), strict=True)
        assert list(ext) == n.ext
        assert [set(c.owners(i)) for i in range(n.n)] == n.seq
        assert (c.n_used, c.has_shift) == (len(n.used()), n.has_shift)
        copy.deepcopy(c).check()  # a copy, because asking would refresh what has grown stale

    @rule(s=SEQS)
    def ends(self, s: int) -> None:
        """Asked for now and then only, so that the cached ends grow stale in between."""
        c, n = self.cells, self.naive
        assert (c.pos_min(s), c.pos_max(s)) == (n.pos_min(s), n.pos_max(s))
        assert (c.used_min, c.used_max_p1) == (n.used_min(), n.used_max_p1())


TestCellOperations = CellOperations.TestCase
TestCellOperations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
