"""Recurrent states over random ubatches, verbs and rollbacks, judged by the tokens that each row would hold.

Every sequence has a history of tokens; the row that its state is read from must hold exactly that history. The cells
themselves must be those of the specification's own search.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.naive_recurrent import GARBAGE, INF, NaiveRecurrent, Rows
from support.resume_runs import spread
from support.ubatches import ubatch

from pykv.batch.ubatch import UBatch
from pykv.cells import RecurrentCells, RecurrentSlot
from pykv.errors import ParamError

N_SEQ = 4
SEQS = st.integers(0, N_SEQ - 1)
POS = st.integers(-1, 12)
RANGES = st.one_of(st.just((-1, -1)), st.tuples(POS, st.just(-1)), st.tuples(POS, POS))

History = list[tuple[int, int]]
"""Tokens and their positions, oldest first."""


def before(history: History, p: int) -> History:
    """Return a history without its newest tokens from position `p` on."""
    n = len(history)
    while n and history[n - 1][1] >= p:
        n -= 1
    return history[:n]


def clip(span: tuple[int, int]) -> tuple[int, int]:
    return max(span[0], 0), INF if span[1] < 0 else span[1]


def state(cells: RecurrentCells) -> dict[str, object]:
    return copy.deepcopy(dict(vars(cells.table)))


class States(RuleBasedStateMachine):
    """Subclasses choose how many snapshots there are."""

    n_rs_seq: ClassVar[int] = 0

    @initialize(spare=st.integers(0, 2))
    def start(self, spare: int) -> None:
        self.n = N_SEQ + spare
        self.cells = RecurrentCells(self.n, N_SEQ, self.n_rs_seq)
        self.naive = NaiveRecurrent(self.n, self.n_rs_seq)
        self.rows = Rows(self.n, self.n_rs_seq)
        self.histories: list[History] = [[] for _ in range(N_SEQ)]
        self.n_tokens = 0

    # what is expected

    def pos(self, s: int) -> int:
        return self.histories[s][-1][1] if self.histories[s] else -1

    def kept(self, s: int, cut: History) -> bool:
        """Whether a snapshot of an earlier state of a sequence can be found where it was written."""
        history, table = self.histories[s], self.cells.table
        back = len(history) - len(cut)
        if not cut or back > self.n_rs_seq or table.plane[s]:
            return False
        in_order = all(a[1] <= b[1] for a, b in pairwise(history[-back - 1 :]))
        return in_order and self.rows.rows[back * self.n + table.tail[s]] == tuple(t for t, _ in cut)

    def adopt(self) -> None:
        """Let the model go on from pykv's cells, where these have to differ."""
        table, naive = self.cells.table, self.naive
        naive.head, naive.used = table.head, table.used
        for c, cell in enumerate(naive.cells):
            cell.ids, cell.src = set(table.owners[c]), table.src[c]
            cell.pos = table.pos(table.owners[c][0]) if table.owners[c] else -1
            cell.tail = table.tail[c] if c < N_SEQ else -1

    def follow(self) -> None:
        """Give the model the positions and planes that pykv decides on differently."""
        table = self.cells.table
        self.naive.rs_idx[:N_SEQ] = table.plane
        for cell in self.naive.cells:
            if cell.ids:
                cell.pos = table.pos(min(cell.ids))

    # ubatches

    def draw_ubatch(self, data: st.DataObject, histories: list[History]) -> tuple[UBatch, list[tuple[int, ...]]]:
        """Draw sets of sequences and as many tokens for each, and put these behind `histories`."""
        order = data.draw(st.permutations(range(N_SEQ)), "order")
        sets: list[tuple[int, ...]] = []
        for s in order[: data.draw(st.integers(1, N_SEQ), "sequences")]:
            if sets and data.draw(st.integers(0, 5), "coupled") == 0:
                sets[-1] = tuple(sorted((*sets[-1], s)))
            else:
                sets.append((s,))
        each = data.draw(st.sampled_from([1, 2, 3, 4, 5]), "tokens each")
        gap = data.draw(st.sampled_from([1, 1, 1, 1, 0, 3]), "step")
        entries = []
        for ids in sets:
            history = list(histories[ids[0]])
            for _ in range(each):
                history.append((self.n_tokens, history[-1][1] + gap if history else 0))
                self.n_tokens += 1
                entries.append((ids, history[-1][1]))
            for s in ids:
                histories[s] = history
        made = ubatch(entries, equal=True)
        return made, sets

    def tokens(self, ub: UBatch, sets: list[tuple[int, ...]], histories: list[History]) -> list[list[int]]:
        return [[t for t, _ in histories[ids[0]][-ub.n_seq_tokens :]] for ids in sets]

    def compare_slot(self, slot: RecurrentSlot, ub: UBatch, sets: list[tuple[int, ...]], agree: bool) -> None:
        last = [int(ub.pos[0, (k + 1) * ub.n_seq_tokens - 1]) for k in range(len(sets))]
        assert self.naive.find_slot(sets, last)
        s_copy = self.naive.s_copy()
        assert slot.n_seqs == len(sets)
        assert slot.n_planes == min(ub.n_seq_tokens, self.n_rs_seq + 1)
        if agree:
            assert (slot.head, slot.n, slot.rs_z) == (self.naive.head, self.naive.n, self.naive.rs_z)
            assert slot.s_copy.tolist() == s_copy
        else:
            self.adopt()
        self.follow()  # the next ubatch may be of sequences that shared a cell which is in plane 0 now

    def agree(self) -> bool:
        """Whether the owners of every cell read the same plane, as llama.cpp takes for granted."""
        table = self.cells.table
        return all(len({table.plane[s] for s in ids}) < 2 for ids in table.owners)

    @rule(data=st.data())
    def decode_one(self, data: st.DataObject) -> None:
        self.decode(data, 1)

    @rule(data=st.data(), several=st.integers(1, 3))
    def decode(self, data: st.DataObject, several: int) -> None:
        after = list(self.histories)
        made = [(*self.draw_ubatch(data, after), list(after)) for _ in range(several)]
        kept = state(self.cells)
        slots = self.cells.prepare([ub for ub, _, _ in made])
        assert state(self.cells) == kept
        for slot, (ub, sets, histories) in zip(slots, made, strict=True):
            agree = self.agree()
            self.cells.apply(slot)
            self.compare_slot(slot, ub, sets, agree)
            self.rows.compute(slot, self.tokens(ub, sets, histories))
            self.histories = histories

    @rule(data=st.data(), put_back=st.sampled_from(["all", "moved", "none"]))
    def fail(self, data: st.DataObject, put_back: str) -> None:
        """Let a computation fail after it has written over all that it may."""
        after = list(self.histories)
        ub, sets = self.draw_ubatch(data, after)
        slot = self.cells.find_slot(ub)
        kept, rows, where = state(self.cells), list(self.rows.rows), [self.cells.row(s) for s in range(N_SEQ)]
        self.cells.apply(slot)
        self.rows.compute(slot, self.tokens(ub, sets, after))
        at_risk = set(slot.rows_at_risk(self.n, self.n_rs_seq).tolist())
        assert at_risk == self.rows.written
        if put_back == "all":
            self.rows.rows = rows
            assert self.cells.retract(slot, touched=False) == ()
            assert state(self.cells) == kept
            return
        taking = {s for ids in sets for s in ids}
        moved = {row for s, row in enumerate(where) if row in at_risk and s not in taking}
        assert slot.rows_moved() == tuple(sorted(moved))
        kept = moved if put_back == "moved" else set()
        for row in at_risk:
            self.rows.rows[row] = rows[row] if row in kept else GARBAGE
        lost = self.cells.retract(slot, kept=kept)
        assert lost == tuple(s for s in range(N_SEQ) if where[s] in at_risk - kept)
        for s in lost:
            self.histories[s] = []
        self.adopt()

    # verbs

    def seq_rm(self, s: int, span: tuple[int, int]) -> None:
        p0, p1 = clip(span)
        hit = [q for q in (range(N_SEQ) if s < 0 else [s]) if p0 <= self.pos(q) < p1]
        kept = state(self.cells)
        if p0 == 0:
            assert self.cells.seq_rm(s, *span)
            for q in hit:
                self.naive.seq_rm(q, -1, -1)
                self.histories[q] = []
            return
        cuts = {q: before(self.histories[q], p0) for q in hit}
        expected = all(self.kept(q, cut) for q, cut in cuts.items())
        assert self.cells.seq_rm(s, *span) == expected
        if expected:
            for q, cut in cuts.items():
                self.histories[q] = cut
        else:
            assert state(self.cells) == kept

    @rule(s=SEQS, back=st.integers(1, 4))
    def roll_back(self, s: int, back: int) -> None:
        """Remove the last few tokens, of the first sequence from `s` on that can take it."""
        able = [q for q in (*range(s, N_SEQ), *range(s)) if self.kept(q, self.histories[q][:-back])]
        s = able[0] if able else s
        if self.pos(s) >= back:
            self.seq_rm(s, (self.pos(s) + 1 - back, -1))

    def seq_cp(self, src: int, dst: int, span: tuple[int, int]) -> None:
        p0, p1 = clip(span)
        cut = before(self.histories[src], p1)
        kept = state(self.cells)
        if src == dst or p0 >= p1 or p0 > max(self.pos(src), 0):
            self.cells.seq_cp(src, dst, *span)
            assert state(self.cells) == kept
        elif cut == self.histories[src] or self.kept(src, cut):
            self.cells.seq_cp(src, dst, *span)
            self.naive.seq_cp(src, dst)
            self.histories[dst] = cut
        else:
            with pytest.raises(ParamError, match="p1"):
                self.cells.seq_cp(src, dst, *span)
            assert state(self.cells) == kept

    @rule(pair=st.permutations(range(N_SEQ)), back=st.integers(1, 3))
    def fork_and_roll_back(self, pair: list[int], back: int) -> None:
        """Let two sequences share a cell and take one of them back, which chance alone seldom does."""
        able = [q for q in pair if self.kept(q, self.histories[q][:-back])]
        src, dst, *_ = sorted(pair, key=lambda q: q not in able)
        self.seq_cp(src, dst, (-1, -1))
        self.roll_back(pair[0], back)

    def seq_keep(self, s: int) -> None:
        self.cells.seq_keep(s)
        self.naive.seq_keep(s)
        self.histories = [history if q == s else [] for q, history in enumerate(self.histories)]

    def move(self, s: int, moved: History) -> None:
        if moved and moved[-1][1] < 0:
            self.naive.seq_rm(s, -1, -1)
            moved = []
        self.histories[s] = moved

    def seq_add(self, s: int, span: tuple[int, int], d: int) -> None:
        p0, p1 = clip(span)
        self.cells.seq_add(s, *span, d)
        self.move(s, [(t, p + d if p0 <= p < p1 else p) for t, p in self.histories[s]])

    def seq_div(self, s: int, span: tuple[int, int], d: int) -> None:
        p0, p1 = clip(span)
        self.cells.seq_div(s, *span, d)
        self.move(s, [(t, p // d if p0 <= p < p1 else p) for t, p in self.histories[s]])

    def clear(self) -> None:
        self.cells.clear()
        self.naive.clear()
        self.histories = [[] for _ in range(N_SEQ)]

    def restore(self, s: int, pos: int) -> None:
        """Write a state from elsewhere into the row that the cells name."""
        row = self.cells.place(s, pos)
        self.naive.seq_rm(s, -1, -1)
        self.naive.find_slot([(s,)], [pos])
        assert row == self.naive.head
        self.histories[s] = [(self.n_tokens, pos)]
        self.rows.rows[row] = (self.n_tokens,)
        self.n_tokens += 1

    @rule(s=SEQS, p=st.integers(0, 14))
    def resumable(self, s: int, p: int) -> None:
        """What is said to be resumable can be cut there, and nothing else."""
        end = self.pos(s) + 1
        points = [q in (0, end) or (q < end and copy.deepcopy(self.cells).seq_rm(s, q, -1)) for q in range(p + 1)]
        assert spread(self.cells.resume_points(s, p), p) == points
        answer = self.cells.why_not_resumable(s, p)
        assert (answer is None) == points[p]
        if answer:
            reason, largest = answer
            assert largest == max(q for q in range(p + 1) if points[q])
            pending = self.cells.table.plane[s] > 0
            assert reason == ("missing" if p > end else "rollback_pending" if pending else "state_gone")

    @rule(verb=st.sampled_from(["seq_rm", "seq_cp", "seq_add", "seq_div", "others"]), s=SEQS, t=SEQS, data=st.data())
    def verb(self, verb: str, s: int, t: int, data: st.DataObject) -> None:
        """Do what changes sequences, mostly near where they end, and seldom what leaves little of them."""
        if verb == "others":
            verb = data.draw(st.sampled_from(["clear", "seq_keep", "restore", "remove_all"]), "other")
        near = st.integers(-3, 2).map(lambda d: max(self.pos(s) + d, 0))
        span = data.draw(st.one_of(RANGES, st.tuples(near, st.just(-1)), st.just((-1, -1))), "span")
        match verb:
            case "clear":
                self.clear()
            case "seq_keep":
                self.seq_keep(s)
            case "restore":
                self.restore(s, t)
            case "remove_all":
                self.seq_rm(-1, span)
            case "seq_rm":
                self.seq_rm(s, span)
            case "seq_cp":
                self.seq_cp(s, t, span)
            case "seq_add":
                self.seq_add(s, span, data.draw(st.integers(-3, 3), "delta"))
            case "seq_div":
                self.seq_div(s, span, data.draw(st.integers(1, 3), "d"))

    # always

    @invariant()
    def histories_are_where_they_are_read(self) -> None:
        if not hasattr(self, "cells"):
            return
        self.cells.check()
        for s, history in enumerate(self.histories):
            row = self.cells.row(s)
            assert (row is None) == (not history)
            assert self.cells.pos_min(s) == self.cells.pos_max(s) == self.pos(s)
            if row is not None:
                assert self.rows.rows[row] == tuple(t for t, _ in history)

    @invariant()
    def cells_are_those_of_the_specification(self) -> None:
        if not hasattr(self, "cells"):
            return
        table = self.cells.table
        assert [set(ids) for ids in table.owners] == [cell.ids for cell in self.naive.cells]
        assert table.src == [cell.src for cell in self.naive.cells]
        assert table.tail == [cell.tail for cell in self.naive.cells[:N_SEQ]]
        assert (table.head, table.used) == (self.naive.head, self.naive.used)
        self.follow()


def test_a_sequence_that_leaves_a_coupled_ubatch_after_a_rollback_reads_the_latest_state() -> None:
    """It had been taken back before it was coupled; the next ubatch of the same batch is of it alone."""
    cells, rows = RecurrentCells(4, 4, 1), Rows(4, 1)

    def compute(made: list[tuple[list[tuple[int, ...]], list[list[int]], int]]) -> None:
        ubatches = [
            ubatch([(ids, pos + i) for ids, new in zip(sets, tokens, strict=True) for i in range(len(new))], equal=True)
            for sets, tokens, pos in made
        ]
        for slot, (_, tokens, _) in zip(cells.prepare(ubatches), made, strict=True):
            cells.apply(slot)
            rows.compute(slot, tokens)

    compute([([(0,)], [[10, 11]], 0), ([(1,)], [[20, 21]], 0)])
    assert cells.seq_rm(1, 1, -1)
    compute([([(0, 1)], [[12]], 2), ([(1,)], [[22]], 3)])
    assert [rows.rows[cells.row(s) or 0] for s in (0, 1)] == [(10, 11, 12), (10, 11, 12, 22)]


@pytest.mark.parametrize("n_rs_seq", [0, 1, 3])
def test_random_programs_keep_every_history(n_rs_seq: int) -> None:
    kind = type("Snapshots", (States,), {"n_rs_seq": n_rs_seq})
    case = kind.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
    case().runTest()
