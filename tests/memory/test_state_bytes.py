"""States of every kind of memory: the bytes that the format asks for, and back to the same bytes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import state_memories
from support.histories import STEPS, live
from support.iswa_memory import make_iswa
from support.kv_scene import plan_batch, run, store_positions
from support.naive_state import naive_state
from support.state_io import load, saved
from support.state_kinds import KINDS, N_SEQ, bookkeeping, data, decode, fill, make, scribble

from pykv.errors import NoSlotError
from pykv.memory import KVCache, LayerSpec, MemorySpec, iswa
from pykv.state_format import Dialect

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
LAYOUTS = [(dtype, False) for dtype in TYPES] + [(dtype, True) for dtype in ("f32", "f16", "bf16")]
EACH = pytest.mark.parametrize("seq_id", [-1, 0, 1, 2])


_unpadded, kind, memory = state_memories.unpadded, state_memories.kind, state_memories.memory


def test_the_bytes_are_those_of_the_format(memory: Any) -> None:
    for seq_id, partial, dialect in product((-1, 0, 1, 2), (False, True), Dialect):
        expected = naive_state(memory, seq_id, partial=partial, says_rotation=dialect.says_rotation)
        assert saved(memory, seq_id, partial=partial, dialect=dialect) == expected, (seq_id, partial, dialect)


@EACH
def test_saved_removed_loaded_and_saved_again(memory: Any, seq_id: int) -> None:
    """Others hold what they held, to the byte."""
    states = {s: saved(memory, s) for s in (-1, *range(N_SEQ))}
    memory.seq_rm(seq_id)
    assert not load(memory, states[seq_id], seq_id)
    memory.check()
    for s in range(N_SEQ):
        assert saved(memory, s) == states[s]
    assert seq_id != -1 or saved(memory) == states[-1]


@EACH
def test_loaded_over_what_it_was_saved_from(memory: Any, seq_id: int) -> None:
    states = {s: saved(memory, s) for s in range(N_SEQ)}
    load(memory, saved(memory, seq_id), seq_id)
    memory.check()
    assert {s: saved(memory, s) for s in range(N_SEQ)} == states
    for s in range(N_SEQ):
        decode(memory, s, 1)


@EACH
def test_into_a_memory_of_another_size_that_holds_something_else(
    memory: Any, kind: tuple[str, bool], seq_id: int
) -> None:
    with make(*kind, n_cells=101) as other:
        for _ in range(3):
            decode(other, 1, 3)
            decode(other, 0, 4)
        scribble(other, 7)
        if seq_id != 0:
            other.seq_rm(0, -1, -1)
        load(other, saved(memory, seq_id), seq_id)
        other.check()
        assert saved(other, seq_id) == saved(memory, seq_id)
        assert [other.pos_max(s) for s in range(N_SEQ) if seq_id in (-1, s)] == [
            memory.pos_max(s) for s in range(N_SEQ) if seq_id in (-1, s)
        ]


def test_a_sequence_becomes_another_one(memory: Any) -> None:
    before = saved(memory, 0)
    load(memory, before, 1)
    memory.check()
    assert memory.pos_max(1) == memory.pos_max(0)
    load(memory, saved(memory, 1), 0)
    assert saved(memory, 0) == before


def test_an_empty_sequence_empties_the_one_that_gets_it(memory: Any) -> None:
    memory.seq_rm(2)
    empty, others = saved(memory, 2), saved(memory, 1)
    load(memory, empty, 0)
    memory.check()
    assert [memory.pos_max(s) for s in range(3)] == [-1, 7, -1]
    assert saved(memory, 1) == others


def test_a_partial_state_brings_back_what_a_cut_cannot(kind: tuple[str, bool]) -> None:
    """As checkpoints do: all behind is cut off, and windows and states are those of then."""
    name, unified = kind
    with make(name, unified, **{"n_rs_seq": 3} if "hybrid" in name else {}) as memory:
        decode(memory, 0, 12)
        scribble(memory)
        kept, whole = saved(memory, 0, partial=True), saved(memory, 0)
        decode(memory, 0, 3)
        if name in ("iswa", "hybrid", "hybrid iswa"):
            load(memory, kept, 0, partial=True)
            assert memory.seq_rm(0, 12)
        else:
            load(memory, kept, 0, partial=True)
        memory.check()
        assert saved(memory, 0) == whole
        decode(memory, 0, 1)


def test_what_moved_and_what_is_copied_comes_first(kind: tuple[str, bool]) -> None:
    with make(*kind) as memory, make(*kind) as other:
        for one in (memory, other):
            fill(one)
            one.seq_cp(0, 1)
            if kind[0] != "keys alone" or one.can_shift():
                one.seq_add(1, 0, -1, 3)
        other.update()
        assert saved(memory, 1) == saved(other, 1) == naive_state(other, 1)


# kinds of rows

LAYER = LayerSpec(2, 64, 64)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(("dtype", "v_trans"), LAYOUTS)
def test_every_type_in_a_cache_with_holes(dtype: str, v_trans: bool, unified: bool) -> None:
    with KVCache(
        MemorySpec((LAYER, LAYER)),
        n_cells=32,
        n_seq_max=2,
        type_k=dtype,
        type_v=dtype,
        v_trans=v_trans,
        unified=unified,
    ) as cache:
        for i in range(12):
            store_positions(cache, [(0, i), (1, i)])
        scribble(cache)
        cache.seq_rm(0, 3, 5)
        before = [saved(cache, s) for s in (-1, 0, 1)]
        assert before == [naive_state(cache, s) for s in (-1, 0, 1)]
        cache.seq_rm(0)
        load(cache, before[1], 0)
        assert [saved(cache, s) for s in (0, 1)] == before[1:]
        load(cache, before[0])
        assert [saved(cache, s) for s in (-1, 0, 1)] == before


@pytest.mark.parametrize(
    "spec", [MemorySpec((LAYER, LAYER)), MemorySpec((LAYER, LayerSpec(1, 64, 32)))], ids=["", "padded"]
)
def test_v_is_written_as_the_cache_was_made_however_it_lies_now(spec: MemorySpec) -> None:
    """Where layers differ in width, the narrow ones are padded in memory, and not in the state."""
    for v_trans in (True, False):
        with KVCache(spec, n_cells=32, n_seq_max=2, v_trans=v_trans) as cache:
            for i in range(9):
                store_positions(cache, [(0, i), (1, i)])
            scribble(cache)
            before = [saved(cache, s) for s in (-1, 0)]
            assert before == [naive_state(cache, s) for s in (-1, 0)]
            if cache.store.can_turn_v:
                cache.store_v(not v_trans)
                assert [saved(cache, s) for s in (-1, 0)] == before
                cache.seq_rm(0)
                load(cache, before[1], 0)
                assert saved(cache, 0) == before[1]
                load(cache, before[0])
                cache.store_v(v_trans)
                assert [saved(cache, s) for s in (-1, 0)] == before


def test_columns_rows_and_tokens_are_kept_where_positions_have_several_axes() -> None:
    spec = MemorySpec((LAYER,), n_pos_per_embd=4)
    with KVCache(spec, n_cells=16, n_seq_max=2) as cache:
        store_positions(cache, run(0, range(5)))
        cache.streams.cells[0].ext_set(np.arange(5), np.arange(5) + 7, np.arange(5) * 2, np.arange(5) + 100)
        scribble(cache)
        for seq_id in (0, -1):
            before = saved(cache, seq_id)
            assert before == naive_state(cache, seq_id)
            load(cache, before, seq_id)
            assert saved(cache, seq_id) == before
            view = cache.cells()
            assert view.token.tolist()[:5] == [100, 101, 102, 103, 104]


def test_tokens_that_a_state_does_not_tell_are_not_known() -> None:
    with KVCache(MemorySpec((LAYER,)), n_cells=16, n_seq_max=2) as cache:
        store_positions(cache, run(0, range(3)))
        load(cache, saved(cache, 0), 0)
        assert cache.seen(0)[1].tolist() == [-1, -1, -1]


# the reference's own checks


@pytest.mark.parametrize("unified", [True, False])
def test_removing_one_of_two_equal_sequences_leaves_the_other_ones_state(unified: bool) -> None:
    with make("kv", unified) as memory:
        decode(memory, 0, 6)
        memory.seq_cp(0, 1)
        memory.update()
        scribble(memory)
        before = saved(memory, 1)
        memory.seq_rm(0)
        assert saved(memory, 1) == before


def test_cells_in_two_runs_come_back_in_another_two() -> None:
    with make("kv", n_cells=6) as memory:
        for s, p in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)):
            store_positions(memory, [(s, p)])
        scribble(memory)
        before = saved(memory, 1)
        memory.seq_rm(0)
        load(memory, before, 1)
        assert saved(memory, 1) == before


def test_a_sequence_fits_into_the_holes_between_others() -> None:
    with make("kv", n_cells=256) as memory:
        for p in range(70):
            store_positions(memory, [(0, p), (1, p), (2, p)])
        scribble(memory)
        states = [saved(memory, s) for s in range(3)]
        memory.seq_rm(1)
        load(memory, states[1], 1)
        assert [saved(memory, s) for s in range(3)] == states
        assert plan_batch(memory, [(1, 70)]) is not None


def test_a_rollback_is_written_as_what_it_comes_to() -> None:
    for name in ("recurrent", "hybrid"):
        with make(name, n_rs_seq=6) as memory, make(name, n_rs_seq=3) as other:
            decode(memory, 0, 8)
            scribble(memory)
            assert memory.seq_rm(0, 6)
            decode(other, 0, 8)
            assert other.seq_rm(0, 7)
            load(other, saved(memory, 0), 0)
            other.check()
            assert saved(other, 0) == saved(memory, 0) == naive_state(memory, 0)
            assert not other.seq_rm(0, 5)
            load(other, saved(memory))
            assert saved(other, 0) == saved(memory, 0)


def test_sequences_that_share_a_cell_but_not_a_state_are_written_as_two() -> None:
    with make("recurrent", n_rs_seq=4) as memory:
        decode(memory, 0, 6)
        memory.seq_cp(0, 1)
        assert memory.seq_rm(1, 4)
        scribble(memory)
        states = [saved(memory, s) for s in range(2)]
        load(memory, saved(memory))
        memory.check()
        assert [memory.pos_max(s) for s in range(3)] == [5, 3, -1]
        assert [saved(memory, s) for s in range(2)] == states


# windows


def test_a_full_window_takes_cells_that_nobody_sees_any_more() -> None:
    memory = make_iswa(64, n_swa=4, n_ubatch=4, n_seq_max=2)
    with memory:
        decode(memory, 0, 4)
        scribble(memory)
        kept = saved(memory, 0)
        memory.seq_rm(0)
        for _ in range(5):
            decode(memory, 1, 4)
        free = memory.swa.n_cells - memory.swa.streams.cells[0].n_used
        before = saved(memory, 1)
        assert free < 4
        load(memory, kept, 0)
        memory.check()
        assert (saved(memory, 0), saved(memory, 1)) == (kept, before)


# any history


@pytest.mark.parametrize(("name", "unified"), KINDS, ids=str)
@settings(max_examples=8, deadline=None)
@given(steps=STEPS, other=STEPS, seq_id=st.integers(-1, 2))
def test_any_history_saved_and_loaded_into_any_other(
    name: str, unified: bool, steps: list, other: list, seq_id: int
) -> None:
    before_pad, iswa.PAD = iswa.PAD, 1
    try:
        with make(name, unified) as one, make(name, unified, n_cells=80) as two:
            live(one, steps)
            live(two, other)
            scribble(one, 1)
            one.update()
            two.update()
            assert saved(one, seq_id) == naive_state(one, seq_id)
            before = {s: saved(two, s) for s in range(3)}
            held = bookkeeping(two), data(two)
            try:
                load(two, saved(one, seq_id), seq_id)
            except NoSlotError:
                assert (bookkeeping(two), data(two)) == held
                return
            two.check()
            for s in range(3):
                assert saved(two, s) == (saved(one, s) if seq_id in (-1, s) else before[s])
    finally:
        iswa.PAD = before_pad
