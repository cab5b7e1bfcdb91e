"""Where a window memory may go on, over random programs, against plain lists of what each of its caches holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.iswa_memory import LAYERS, both, positions
from support.kv_scene import plan_batch, run
from support.naive_cells import masked_swa
from support.naive_sequences import NaiveSequences
from support.resume_runs import spread

from pykv.cells import SwaType, Window
from pykv.errors import BatchError, ShiftUnsupported
from pykv.memory import ISWACache, KVSettings, MemorySpec, iswa

N_SEQ, N_CELLS, N_UBATCH = 2, 40, 4
SEQS, BOUNDS = st.integers(0, N_SEQ - 1), st.integers(-1, 30)


class WindowMachine(RuleBasedStateMachine):
    """Decodes, cuts, copies and moves; after each step every position is asked about."""

    @initialize(
        unified=st.booleans(), n_swa=st.integers(1, 5), kind=st.sampled_from(["STANDARD", "CHUNKED", "SYMMETRIC"])
    )
    def start(self, unified: bool, n_swa: int, kind: str) -> None:
        self.n_swa, self.kind = n_swa, kind
        spec = MemorySpec(LAYERS, Window(n_swa, SwaType[kind]))
        kv = KVSettings(N_CELLS, n_seq_max=N_SEQ, unified=unified)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(iswa, "PAD", 1)
            self.memory = ISWACache(spec, kv, n_ubatch=N_UBATCH, n_threads=1)
        self.naive = NaiveSequences(N_SEQ, N_CELLS, unified)

    @rule(s=SEQS, n=st.integers(1, 9))
    def decode(self, s: int, n: int) -> None:
        self.memory.update()  # which a batch begins with, whatever becomes of it
        first, before = self.memory.pos_max(s) + 1, both(self.memory)
        if n > self.naive.n_free(s):
            return
        lost = [p for p in self._lost(s) if not self._is_hidden(p, first)]
        try:
            plan = plan_batch(self.memory, run(s, range(first, first + n)), N_UBATCH)
        except BatchError as error:
            assert lost, error  # noqa: PT017
            assert both(self.memory) == before
            return
        assert lost == []
        if plan is None:
            assert any(self._has_doubles(one) for one in range(N_SEQ)), "only doubled positions overfill a window"
            return
        for i in range(len(plan.ubatches)):
            plan.apply(i)
        for p in range(first, first + n):
            self.naive.store(s, p, p)

    @rule(s=st.integers(-1, N_SEQ - 1), p0=BOUNDS, p1=BOUNDS)
    def seq_rm(self, s: int, p0: int, p1: int) -> None:
        assert self.memory.seq_rm(s, p0, p1) is True
        self.naive.seq_rm(s, p0, p1)

    @rule(s=SEQS, back=st.integers(1, 9))
    def cut(self, s: int, back: int) -> None:
        self.seq_rm(s, max(0, self.memory.pos_max(s) + 1 - back), -1)

    @rule(src=SEQS, dst=SEQS)
    def fork(self, src: int, dst: int) -> None:
        if src != dst:
            self.seq_rm(dst, -1, -1)
            self.memory.seq_cp(src, dst)
            self.naive.seq_cp(src, dst, -1, -1)

    @rule(s=SEQS, p0=BOUNDS, delta=st.integers(-5, 5))
    def seq_add(self, s: int, p0: int, delta: int) -> None:
        before = both(self.memory)
        try:
            self.memory.seq_add(s, p0, -1, delta)
        except ShiftUnsupported:
            assert both(self.memory) == before
        else:
            assert self.naive.seq_add(s, p0, -1, delta)

    @invariant()
    def resumable_is_what_the_lists_say(self) -> None:
        self.memory.check()
        for s in range(N_SEQ):
            base, swa = positions(self.memory.base, s), positions(self.memory.swa, s)
            assert base == [p for p, _ in self.naive.rows(s)]
            end = self.memory.pos_max(s) + 3
            points = [self._may_go_on(base, swa, p) for p in range(end + 1)]
            assert spread(self.memory.resume_points(s, end), end) == points
            for p in range(max(0, end - 8), end + 1):
                answer = self.memory.resumable(s, p)
                assert bool(answer) is points[p]
                assert answer.largest == max(q for q in range(p + 1) if points[q])
                assert answer.reason in ((None,) if points[p] else ("missing", "window_gone"))

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()

    def _may_go_on(self, base: list[int], swa: list[int], p: int) -> bool:
        """session.md 5.1: every earlier row where all is seen, every row in the window where that is all."""
        return all(j in base for j in range(p)) and all(j in swa for j in range(p) if not self._is_hidden(j, p))

    def _is_hidden(self, p0: int, p1: int) -> bool:
        return masked_swa(self.n_swa, self.kind, p0, p1)

    def _lost(self, s: int) -> list[int]:
        """Return the positions that `base` holds more often than `swa`."""
        base, swa = positions(self.memory.base, s), positions(self.memory.swa, s)
        return [p for p in {*base} if base.count(p) > swa.count(p)]

    def _has_doubles(self, s: int) -> bool:
        rows = [p for p, _ in self.naive.rows(s)]
        return len({*rows}) < len(rows)


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
