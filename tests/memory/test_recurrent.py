"""A memory of states in use: every row that a sequence reads must hold what its tokens make of zeros."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.state_scene import StateScene, spoil, state_after, state_spec

from pykv.errors import ParamError, UseAfterCloseError
from pykv.memory import LayerSpec, MemorySpec, RecurrentMemory, StateSpec

N_SEQ = 4
LONGEST = 20
"""Tokens of a sequence: h = 2h + token, with tokens below 8, is exact in f32 as far as this."""

SEQS = st.integers(0, N_SEQ - 1)


class States(RuleBasedStateMachine):
    """Subclasses choose how many snapshots there are."""

    n_rs_seq: ClassVar[int] = 0

    @initialize()
    def start(self) -> None:
        self.memory = RecurrentMemory(state_spec(), N_SEQ, self.n_rs_seq)
        self.scene = StateScene(self.memory)
        spoil(self.memory)

    def teardown(self) -> None:
        self.memory.close()

    def draw(self, data: st.DataObject) -> list[tuple[int | tuple[int, ...], int]]:
        """Draw runs of tokens of some sequences, interleaved or not."""
        batch: list[tuple[int | tuple[int, ...], int]] = []
        for s in data.draw(st.lists(SEQS, min_size=1, max_size=N_SEQ, unique=True), "sequences"):
            room = LONGEST - len(self.scene.tokens.get(s, []))
            tokens = data.draw(st.lists(st.integers(0, 7), min_size=min(1, room), max_size=min(7, room)), "tokens")
            batch += [(s, token) for token in tokens]
        if data.draw(st.booleans(), "interleaved"):
            turns = data.draw(st.permutations([s for s, _ in batch]), "turns")
            left = {s: iter([t for own, t in batch if own == s]) for s in turns}
            batch = [(s, next(left[s])) for s in turns]
        return batch

    def n_ubatch(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([64, self.n_rs_seq + 2, self.n_rs_seq + 5]), "n_ubatch")

    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        batch = self.draw(data)
        if batch:
            self.scene.decode(batch, self.n_ubatch(data))

    @rule(data=st.data(), s=SEQS)
    def decode_for_several(self, data: st.DataObject, s: int) -> None:
        alike = tuple(o for o in range(N_SEQ) if self.scene.tokens.get(o, []) == self.scene.tokens.get(s, []))
        room = LONGEST - len(self.scene.tokens.get(s, []))
        tokens = data.draw(st.lists(st.integers(0, 7), max_size=min(5, room)), "tokens")
        if tokens:
            self.scene.decode([(alike, token) for token in tokens], self.n_ubatch(data))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """All that a computation may have written is spoilt; nobody may stand on it who is not told to be lost."""
        batch = self.draw(data)
        if not batch:
            return
        plan = self.scene.plan(batch, 64)
        plan.apply(0)
        spoil(self.memory, plan.slots[0].rows_at_risk(self.memory.n_cells, self.n_rs_seq).tolist())
        for s in plan.retract(0):
            self.scene.tokens.pop(s)

    @rule(src=SEQS, dst=SEQS)
    def copy(self, src: int, dst: int) -> None:
        self.memory.seq_cp(src, dst)
        self.scene.tokens[dst] = list(self.scene.tokens.get(src, []))

    @rule(s=SEQS, back=st.integers(1, 6))
    def cut(self, s: int, back: int) -> None:
        tokens = self.scene.tokens.get(s, [])
        p = max(0, len(tokens) - back)
        can = bool(self.memory.resumable(s, p))
        assert self.memory.seq_rm(s, p) == can
        if can:
            self.scene.tokens[s] = tokens[:p]

    @rule(s=SEQS, p0=st.integers(0, LONGEST))
    def cut_what_is_not_the_end(self, s: int, p0: int) -> None:
        """What has gone into a state stays there."""
        end = len(self.scene.tokens.get(s, [])) - 1
        assert self.memory.seq_rm(s, p0, min(p0, end))
        assert self.memory.seq_rm(s, end + 1)

    @rule(s=SEQS)
    def remove(self, s: int) -> None:
        assert self.memory.seq_rm(s)
        self.scene.tokens.pop(s, None)

    @rule(s=SEQS)
    def keep(self, s: int) -> None:
        self.memory.seq_keep(s)
        self.scene.tokens = {s: self.scene.tokens.get(s, [])}

    @rule(data=st.booleans())
    def clear(self, data: bool) -> None:
        self.memory.clear(data)
        self.scene.tokens = {}

    @invariant()
    def rows_hold_what_they_should(self) -> None:
        self.scene.check()


class WithSnapshots(States):
    n_rs_seq = 3


TestStates = States.TestCase
TestStates.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)
TestWithSnapshots = WithSnapshots.TestCase
TestWithSnapshots.settings = settings(max_examples=15, stateful_step_count=14, deadline=None)


def scene(n_seq_max: int = 1, n_rs_seq: int = 0) -> StateScene:
    found = StateScene(RecurrentMemory(state_spec(), n_seq_max, n_rs_seq))
    spoil(found.memory)
    return found


@pytest.mark.parametrize("n_ubatch", [5, 6, 7, 64])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_as_many_tokens_as_there_are_snapshots_can_be_taken_back_once(n_ubatch: int, back: int) -> None:
    """However the batch is split, its last tokens stay together."""
    one = scene(n_rs_seq=3)
    tokens = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]
    one.decode([(0, t) for t in tokens], n_ubatch)
    assert not one.memory.seq_rm(0, 10 - 4)
    assert one.memory.seq_rm(0, 10 - back)
    one.tokens[0] = tokens[:-back]
    one.check()
    answer = one.memory.resumable(0, 9 - back)
    assert (answer.reason, answer.largest) == ("rollback_pending", 0)
    assert not one.memory.seq_rm(0, 9 - back)
    one.check()
    one.decode([(0, 7), (0, 7)], n_ubatch)
    one.check()


def test_single_tokens_leave_nothing_to_go_back_to() -> None:
    one = scene(n_rs_seq=3)
    one.decode([(0, t) for t in (1, 2, 3, 4)])
    one.decode([(0, 5)])
    assert one.memory.resumable(0, 4).reason == "state_gone"
    assert not one.memory.seq_rm(0, 4)
    one.check()


def test_a_copy_made_before_its_source_goes_back_stays() -> None:
    two = scene(2, n_rs_seq=3)
    two.decode([(0, t) for t in (1, 2, 3, 4, 5)])
    two.memory.seq_cp(0, 1)
    assert two.memory.seq_rm(0, 3)
    two.tokens = {0: [1, 2, 3], 1: [1, 2, 3, 4, 5]}
    two.check()
    two.decode([(0, 6), (1, 7), (1, 7)])
    two.check()


def test_a_copy_may_end_where_a_snapshot_is() -> None:
    two = scene(2, n_rs_seq=3)
    two.decode([(0, t) for t in (1, 2, 3, 4, 5)])
    two.memory.seq_cp(0, 1, 0, 3)
    two.tokens[1] = [1, 2, 3]
    two.check()
    with pytest.raises(ParamError, match="p1 = 1"):
        two.memory.seq_cp(0, 1, 0, 1)
    two.check()


def test_a_sequence_between_two_of_a_batch_moves_behind_them() -> None:
    three = scene(3)
    three.decode([(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)])
    assert three.memory.dump() == "0:1{0} 1:1{1} 2:1{2}"
    three.decode([(0, 7), (2, 7), (2, 7)])
    assert three.memory.dump() == "0:2{0} 1:1{1} 2:3{2}"  # two ubatches of one sequence: neither moves anything
    three.check()
    three.decode([(0, 1), (2, 1)])
    three.check()
    three.memory.seq_rm(1)
    three.memory.seq_cp(0, 1)
    three.tokens[1] = list(three.tokens[0])
    three.decode([((0, 1), 3)])
    three.decode([(1, 2), (2, 2)])
    three.check()


def test_a_row_that_held_no_numbers_begins_with_zeros() -> None:
    two = scene(2)
    two.decode([(0, 1), (1, 2)])
    spoil(two.memory)
    two.memory.clear(data=False)
    two.tokens = {}
    two.decode([(1, 3), (0, 4), (0, 5)])
    assert two.memory.s(0, 0).tolist() == [state_after([4, 5]), -state_after([4, 5])]
    two.check()


@pytest.mark.parametrize("n_seq_max", [1, 3, 16])
@pytest.mark.parametrize("n_rs_seq", [0, 1, 7])
@pytest.mark.parametrize("widths", [(384, 2048), (128, 0), (0, 4096), (3, 2)])
def test_what_is_planned_is_what_is_allocated(n_seq_max: int, n_rs_seq: int, widths: tuple[int, int]) -> None:
    """Rows for each sequence and snapshot, f32: spec params.md section 7."""
    spec = MemorySpec((LayerSpec(2, 16, 16), *[LayerSpec.recurrent(StateSpec(*widths))] * 3))
    with RecurrentMemory(spec, n_seq_max, n_rs_seq) as memory:
        assert memory.nbytes == memory.plan.nbytes
        per_layer = n_seq_max * (1 + n_rs_seq) * 4 * sum(widths)
        assert memory.plan.nbytes_per_layer == dict.fromkeys((1, 2, 3), per_layer)
        tensors = [t for il in (1, 2, 3) for t in memory.tensors(il) if t is not None]
        assert sum(t.nbytes for t in tensors) == 3 * per_layer
        assert 3 * per_layer <= memory.nbytes <= 3 * per_layer + 64 * len(tensors)  # each is aligned
        with pytest.raises(ParamError, match="il=0"):
            memory.tensors(0)


def test_tensors_of_a_layer_that_is_none() -> None:
    with RecurrentMemory(MemorySpec((LayerSpec.recurrent(StateSpec(4, 6)),) * 2), 2) as memory:
        for il in ([], True, "0", 1.0, None):
            with pytest.raises(ParamError, match="il"):
                memory.tensors(il)  # type: ignore[arg-type]
        with pytest.raises(ParamError, match="il=2: this memory holds no state"):
            memory.tensors(2)
    with pytest.raises(UseAfterCloseError):
        memory.tensors(0)
