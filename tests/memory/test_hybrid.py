"""A memory of keys, values and states in use: both parts must hold the same tokens after everything that happens."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.state_scene import StateScene, hybrid_spec, spoil, state_after

from pykv.cells import NO_WINDOW, SwaType, Window
from pykv.errors import BatchError, ParamError
from pykv.ggml import DType
from pykv.memory import HybridMemory, KVSettings, MemorySettings, make_memory, memory_plan

N_SEQ = 3
LONGEST = 20
N_UBATCH = 8
SEQS = st.integers(0, N_SEQ - 1)

WINDOW = Window(6, SwaType.STANDARD)


def hybrid(
    n_cells: int = 64, n_seq_max: int = 1, n_rs_seq: int = 0, window: Window = NO_WINDOW, **kv: object
) -> StateScene:
    """Return an empty memory over `hybrid_spec`, whose states hold no numbers."""
    own = KVSettings(n_cells, n_seq_max=n_seq_max, type_k=DType.F32, type_v=DType.F32, **kv)  # type: ignore[arg-type]
    memory = make_memory(hybrid_spec(window), MemorySettings(own, N_UBATCH, n_rs_seq=n_rs_seq))
    assert isinstance(memory, HybridMemory)
    spoil(memory)
    return StateScene(memory)


class Hybrid(RuleBasedStateMachine):
    """Subclasses choose the window and how many snapshots there are."""

    n_rs_seq: ClassVar[int] = 0
    window: ClassVar[Window] = NO_WINDOW

    @initialize(unified=st.booleans())
    def start(self, unified: bool) -> None:
        self.scene = hybrid(64, N_SEQ, self.n_rs_seq, self.window, unified=unified)
        self.memory = self.scene.memory

    def teardown(self) -> None:
        self.memory.close()

    def draw(self, data: st.DataObject) -> list[tuple[int | tuple[int, ...], int]]:
        batch: list[tuple[int | tuple[int, ...], int]] = []
        for s in data.draw(st.lists(SEQS, min_size=1, max_size=N_SEQ, unique=True), "sequences"):
            room = LONGEST - len(self.scene.tokens.get(s, []))
            batch += [(s, t) for t in data.draw(st.lists(st.integers(1, 7), max_size=min(7, room)), "tokens")]
        return batch

    @rule(data=st.data(), n_ubatch=st.sampled_from([5, 6, N_UBATCH]))
    def decode(self, data: st.DataObject, n_ubatch: int) -> None:
        batch = self.draw(data)
        if batch:
            self.scene.decode(batch, n_ubatch)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A sequence whose state is lost is lost in both parts; all others are as they were."""
        batch = self.draw(data)
        if not batch:
            return
        plan = self.scene.plan(batch, N_UBATCH)
        plan.apply(0)
        states = self.memory.recurrent
        spoil(self.memory, plan.slots[0][1].rows_at_risk(states.n_cells, self.n_rs_seq).tolist())
        plan.retract(0)
        self.scene.tokens = {s: held for s, held in self.scene.tokens.items() if states.pos_max(s) >= 0}

    @rule(src=SEQS, dst=SEQS)
    def copy(self, src: int, dst: int) -> None:
        if src != dst:
            self.memory.seq_rm(dst)
            self.memory.seq_cp(src, dst)
            self.memory.update()
            self.scene.tokens[dst] = list(self.scene.tokens.get(src, []))

    @rule(s=SEQS, back=st.integers(1, 6))
    def cut(self, s: int, back: int) -> None:
        tokens = self.scene.tokens.get(s, [])
        p = max(0, len(tokens) - back)
        can = p == len(tokens) or bool(self.memory.recurrent.resumable(s, p))
        assert self.memory.seq_rm(s, p) == can
        if can:
            self.scene.tokens[s] = tokens[:p]

    @rule(s=SEQS)
    def remove(self, s: int) -> None:
        assert self.memory.seq_rm(s)
        self.scene.tokens.pop(s, None)

    @rule()
    def remove_all(self) -> None:
        assert self.memory.seq_rm(-1)
        self.scene.tokens = {}

    @rule(data=st.booleans())
    def clear(self, data: bool) -> None:
        self.memory.clear(data)
        self.scene.tokens = {}

    @invariant()
    def both_parts_hold_the_same(self) -> None:
        self.scene.check()
        for s in range(N_SEQ):
            ends = self.memory.attention.pos_max(s), self.memory.recurrent.pos_max(s), self.memory.pos_max(s)
            assert len(set(ends)) == 1, f"sequence {s} ends at {ends}"


class HybridWithSnapshots(Hybrid):
    n_rs_seq = 3


class HybridWithWindow(Hybrid):
    n_rs_seq = 2
    window = WINDOW


SETTINGS = settings(max_examples=8, stateful_step_count=12, deadline=None)
TestHybrid = Hybrid.TestCase
TestHybrid.settings = SETTINGS
TestHybridWithSnapshots = HybridWithSnapshots.TestCase
TestHybridWithSnapshots.settings = SETTINGS
TestHybridWithWindow = HybridWithWindow.TestCase
TestHybridWithWindow.settings = SETTINGS


def tokens_of(*tokens: int) -> list[tuple[int | tuple[int, ...], int]]:
    return [(0, token) for token in tokens]


@pytest.mark.parametrize("window", [NO_WINDOW, WINDOW], ids=["full", "window"])
def test_a_refused_tail_cut_changes_neither_tokens_nor_state(window: Window) -> None:
    """ggml-org/llama.cpp#28425: callers went on with fewer tokens beside a state that had seen them all."""
    one = hybrid(8, window=window)
    memory = one.memory
    one.decode(tokens_of(1, 2, 3, 4, 5, 6))
    assert memory.s(1, 0)[0] == 120
    before = memory.dump()
    assert memory.seq_rm(0, 4) is False
    assert memory.dump() == before
    assert (memory.attention.pos_max(0), memory.recurrent.pos_max(0), memory.s(1, 0)[0]) == (5, 5, 120)
    answer = memory.resumable(0, 4)
    assert (bool(answer), answer.reason, answer.largest) == (False, "state_gone", 0)
    assert memory.seq_rm(0, 7) is True  # beyond the end
    assert memory.dump() == before
    one.decode(tokens_of(7))
    assert (memory.attention.pos_max(0), memory.recurrent.pos_max(0), memory.s(1, 0)[0]) == (6, 6, 247)
    assert memory.seq_rm(0) is True
    assert (memory.attention.pos_max(0), memory.recurrent.pos_max(0)) == (-1, -1)
    assert memory.recurrent.cells().n_used == 0
    assert memory.attention.used.startswith("0 of") or window is not NO_WINDOW


def test_a_tail_cut_with_a_snapshot_takes_back_both_parts() -> None:
    one = hybrid(8, n_rs_seq=2)
    memory = one.memory
    one.decode(tokens_of(1, 2, 3, 4, 5, 6))
    assert memory.resumable(0, 4)
    assert memory.seq_rm(0, 4) is True
    assert (memory.attention.pos_max(0), memory.recurrent.pos_max(0), memory.s(1, 0)[0]) == (3, 3, 26)
    assert memory.seq_rm(0, 3) is False  # a state goes back once between two decodes
    assert memory.attention.pos_max(0) == 3
    one.tokens[0] = [1, 2, 3, 4]
    one.decode(tokens_of(7, 1))
    one.check()


def test_without_room_for_keys_no_state_moves_on() -> None:
    one = hybrid(8)
    one.decode(tokens_of(1, 2, 3, 4, 5, 6))
    before = one.memory.dump()
    valid = one.valid(tokens_of(7, 7, 7))
    assert one.memory.init_batch(valid, N_UBATCH) is None
    assert one.memory.dump() == before
    one.decode(tokens_of(7, 7))
    one.check()


def test_a_copy_that_one_part_refuses_is_in_neither() -> None:
    two = hybrid(16, 2, unified=True)
    two.decode(tokens_of(1, 2, 3))
    before = two.memory.dump()
    with pytest.raises(ParamError, match="p1 = 2"):
        two.memory.seq_cp(0, 1, 0, 2)
    assert two.memory.dump() == before
    two.check()


@pytest.mark.parametrize("window", [NO_WINDOW, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("reference_moves", [False, True])
def test_a_sequence_whose_state_falls_below_0_leaves_no_keys_behind(window: Window, reference_moves: bool) -> None:
    """A decode at 0 was accepted and attended to them. As llama.cpp moves, the other owner's tokens move too."""
    two = hybrid(64, 3, window=window, unified=True, reference_moves=reference_moves)
    memory = two.memory
    two.decode([((0, 1), t) for t in (1, 2, 3, 4, 5)])
    two.decode([(2, 7)])
    memory.seq_add(0, 4, -1, -5)
    gone = (0, 1) if reference_moves else (0,)
    assert [memory.attention.pos_max(s) for s in range(3)] == [
        -1 if s in gone else two.memory.pos_max(s) for s in range(3)
    ]
    assert [memory.pos_max(s) for s in range(3)] == [-1, -1 if reference_moves else 4, 0]
    for s in gone:
        two.tokens.pop(s)
    two.check()
    two.decode([(0, 3), (0, 2)])
    two.check()


def test_a_common_token_took_the_state_of_the_smallest_id_for_all() -> None:
    two = hybrid(64, 2, unified=True)
    two.decode([(0, 1), (1, 2)])
    before = two.memory.dump()
    with pytest.raises(BatchError, match=r"token 0 is of sequences \[0, 1\], which have states of their own"):
        two.memory.init_batch(two.valid([((0, 1), 5)]), N_UBATCH)
    assert two.memory.dump() == before
    two.memory.seq_cp(0, 1)
    two.tokens[1] = [1]
    two.decode([((0, 1), 5), ((0, 1), 6)])
    two.check()


def test_a_common_token_behind_one_of_its_own_is_refused() -> None:
    """The batch itself sets the states apart before it."""
    two = hybrid(64, 2, unified=True)
    apart = two.valid([(0, 5), (1, 6), ((0, 1), 7)])
    with pytest.raises(BatchError, match=r"token 2 is of sequences \[0, 1\]"):
        two.memory.init_batch(apart, N_UBATCH)
    two.decode([((0, 1), 5), ((0, 1), 6), (0, 7), (1, 8)])
    two.check()


@pytest.mark.parametrize(("removed", "cut", "ends_at"), [((0, 3, 5), 5, None), ((0, 4, 5), 5, 3), ((0, 3, 5), 6, 5)])
def test_a_state_went_back_to_a_token_that_had_been_cut_away(
    removed: tuple[int, int, int], cut: int, ends_at: int | None
) -> None:
    """It ended behind what was attended to; there is none of the token before the hole if that is too long ago."""
    one = hybrid(64, n_rs_seq=3)
    memory = one.memory
    one.decode(tokens_of(1, 2, 3, 4, 5, 6, 7))
    assert memory.seq_rm(*removed)
    before = memory.dump()
    assert memory.seq_rm(0, cut) is (ends_at is not None)
    memory.check()
    if ends_at is None:
        assert memory.dump() == before
    else:
        assert memory.attention.pos_max(0) == memory.recurrent.pos_max(0) == ends_at
        assert memory.s(1, 0)[0] == state_after(range(1, ends_at + 2))


def test_a_sequence_that_loses_all_its_tokens_is_empty_wherever_it_began() -> None:
    one = hybrid(64)
    one.decode(tokens_of(1, 2, 3))
    one.memory.seq_add(0, -1, -1, 20)
    assert one.memory.seq_rm(0, 21) is False
    assert one.memory.seq_rm(0, 20) is True
    assert one.memory.pos_max(0) == one.memory.recurrent.pos_max(0) == -1
    one.memory.check()


def test_a_copy_of_the_last_token_alone_left_its_state_behind_when_that_was_cut() -> None:
    two = hybrid(64, 3, n_rs_seq=3, unified=True)
    memory = two.memory
    two.decode(tokens_of(1, 2, 3, 4, 5, 6, 7))
    memory.seq_cp(0, 2, 6, -1)
    assert memory.seq_rm(2, 4)
    memory.check()
    assert (memory.attention.pos_max(2), memory.recurrent.pos_max(2), memory.pos_max(0)) == (-1, -1, 6)


@pytest.mark.parametrize(("unified", "delta", "cells_end", "state_end"), [(True, -1, -1, 0), (False, 1, 0, 1)])
def test_a_move_as_llama_cpp_has_it_takes_along_only_what_is_shared(
    unified: bool, delta: int, cells_end: int, state_end: int
) -> None:
    """`check` took the other owner for damaged: its tokens were shared and its state was not, or the reverse."""
    two = hybrid(64, 2, unified=unified, reference_moves=True)
    memory = two.memory
    two.decode([(0, 5)])
    memory.seq_cp(0, 1)
    if unified:
        two.tokens[1] = [5]
        two.decode([(1, 6)])
    memory.seq_add(1, -1, -1, delta)
    memory.check()
    assert (memory.attention.pos_max(0), memory.recurrent.pos_max(0)) == (cells_end, state_end)
    assert memory.pos_max(0) == cells_end


@pytest.mark.parametrize(("n_ubatch", "most"), [(8, 6), (2, 0), (1, 0)])
def test_more_snapshots_than_fit_into_a_ubatch_are_refused(n_ubatch: int, most: int) -> None:
    own = KVSettings(64)
    make_memory(hybrid_spec(), MemorySettings(own, n_ubatch, n_rs_seq=most)).close()
    for build in (make_memory, memory_plan):
        with pytest.raises(ParamError, match=f"n_rs_seq={most + 1} must be at most {most}, with n_ubatch={n_ubatch}"):
            build(hybrid_spec(), MemorySettings(own, n_ubatch, n_rs_seq=most + 1))


@pytest.mark.parametrize("window", [NO_WINDOW, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("n_rs_seq", [0, 3])
@pytest.mark.parametrize("unified", [True, False])
def test_what_is_planned_is_what_is_allocated(window: Window, n_rs_seq: int, unified: bool) -> None:
    own = KVSettings(256, n_seq_max=3, unified=unified)
    sizes = MemorySettings(own, 64, n_rs_seq=n_rs_seq)
    plan = memory_plan(hybrid_spec(window), sizes)
    assert list(plan.parts) == (["kv", "states"] if window is NO_WINDOW else ["base", "swa", "states"])
    memory = make_memory(hybrid_spec(window), sizes)
    assert plan.nbytes == memory.nbytes
    streams, state = 1 if unified else 3, 3 * (1 + n_rs_seq) * 4 * (3 + 2)
    assert plan.nbytes_per_layer == {
        0: streams * 256 * 2 * 2 * 4 + state,
        1: state,
        2: streams * 256 * 2 * 2 * 8,
    }
    memory.close()
