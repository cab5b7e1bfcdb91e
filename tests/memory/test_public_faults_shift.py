"""Faults that users of such systems reported about moved positions, on stored keys; tests are named after symptoms.

Every key is compared with one that is freshly written at its position.
"""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cell_state import state
from support.key_scene import NEAR, KeyScene, raw_rows, toy_spec, wavy
from support.naive_sequences import NaiveSequences

from pykv.errors import NoSlotError, ParamError, ShiftUnsupported
from pykv.memory import KVCache, UpdateStatus


def make(n_cells: int, n_layer: int = 1, dtype: str = "f32", **more) -> KVCache:
    return KVCache(toy_spec(n_layer), n_cells=n_cells, type_k=dtype, type_v=dtype, n_threads=1, **more)


def occupied(cache: KVCache) -> str:
    return " ".join(cell for cell in cache.dump().split() if not cell.endswith("."))


def bytes_of(cache: KVCache) -> list[bytes]:
    return [rows.tobytes() for pair in raw_rows(cache) for rows in pair]


# case A01, ggml-org/llama.cpp#3825


@pytest.mark.parametrize("dtype", NEAR)
def test_of_two_queued_shifts_only_the_last_reached_the_keys(dtype: str) -> None:
    with make(8, dtype=dtype) as cache:
        scene = KeyScene(cache)
        scene.store(0, range(6))
        cache.seq_rm(0, 0, 2)
        cache.seq_add(0, 2, 6, -2)
        cache.seq_add(0, 1, 4, 3)
        assert cache.dump() == "0:. 1:. 2:0{0} 3:4{0} 4:5{0} 5:6{0}"
        assert cache.cells().n_used == 4
        assert cache.cells().shift.tolist() == [0, 0, -2, 1, 1, 1, 0, 0]
        assert cache.update() is UpdateStatus.SUCCESS
        assert not cache.cells().shift.any()
        expected = [[1, 0], [-0.6536, -0.7568], [0.2837, -0.9589], [0.9602, -0.2794]]
        assert np.abs(cache.k(0, 0)[:, 0] - expected).max() <= NEAR[dtype] + 5e-5
        assert scene.check(0, NEAR[dtype]) == [(0, 2), (4, 3), (5, 4), (6, 5)]
        before = bytes_of(cache)
        assert cache.update() is UpdateStatus.NO_UPDATE
        assert bytes_of(cache) == before


MOVES = [
    ("seq_add", (0, 2, 6, -2)),
    ("seq_add", (0, 1, 4, 3)),
    ("seq_div", (0, 0, -1, 2)),
    ("seq_div", (0, 3, 9, 3)),
]


@pytest.mark.parametrize("n", [2, 3])
def test_moves_in_any_order_with_or_without_updates_between(n: int) -> None:
    with make(8) as cache:
        scene = KeyScene(cache, wavy)
        for moves, updates in product(permutations(MOVES, n), product((False, True), repeat=n - 1)):
            cache.clear()
            scene.store(0, range(6))
            naive = NaiveSequences(1, 8)
            for p in range(6):
                naive.store(0, p, p)
            for (verb, args), update in zip(moves, (*updates, False), strict=True):
                getattr(cache, verb)(*args)
                getattr(naive, verb)(*args)
                if update:
                    cache.update()
            assert sorted(scene.check(0, NEAR["f32"])) == naive.rows(0), (moves, updates)


def test_moves_that_cancel_out_leave_every_byte_alone() -> None:
    with make(8, dtype="f16") as cache:
        KeyScene(cache, wavy).store(0, range(6))
        before = bytes_of(cache)
        for delta in (5, -2, -3):
            cache.seq_add(0, 0, -1, delta)
        cache.seq_div(0, 0, 1, 3)
        cache.update()
        assert bytes_of(cache) == before


def test_a_pending_shift_was_inherited_by_the_next_token_of_a_freed_cell() -> None:
    with make(6) as cache:
        scene = KeyScene(cache)
        scene.store(0, range(6))
        cache.seq_add(0, 3, 6, 4)
        cache.seq_rm(0, 7, 9)
        cache.seq_add(0, 9, 10, -6)
        scene.store(0, [4, 5], [40, 41])
        assert scene.check(0, NEAR["f32"]) == [(0, 0), (1, 1), (2, 2), (3, 5), (4, 40), (5, 41)]


def test_a_shift_that_empties_a_cell_leaves_it_clean() -> None:
    with make(6) as cache:
        scene = KeyScene(cache)
        scene.store(0, range(6))
        cache.seq_add(0, 0, -1, -4)
        assert occupied(cache) == "4:0{0} 5:1{0}"
        assert cache.cells().shift.tolist() == [0, 0, 0, 0, -4, -4]
        scene.store(0, range(2, 6), range(50, 54))
        assert scene.check(0, NEAR["f32"]) == [(0, 4), (1, 5), (2, 50), (3, 51), (4, 52), (5, 53)]


@pytest.mark.parametrize("unified", [True, False])
def test_a_fork_of_cells_with_a_pending_shift_was_turned_twice_or_never(unified: bool) -> None:
    """Moved before the copy, and the original again after it."""
    with make(16, n_seq_max=2, unified=unified) as cache:
        scene = KeyScene(cache)
        scene.store(0, range(6))
        cache.seq_rm(0, 0, 2)
        cache.seq_add(0, 2, 6, -2)
        cache.seq_cp(0, 1)
        cache.seq_add(0, 2, 4, 3)
        cache.seq_add(1, 1, 2, 9)
        assert scene.check(0, NEAR["f32"]) == [(0, 2), (1, 3), (5, 4), (6, 5)]
        assert scene.check(1, NEAR["f32"]) == [(0, 2), (2, 4), (3, 5), (10, 3)]


def test_a_plan_made_before_a_shift_stored_beside_it() -> None:
    """A verb between planning and storing makes the plan stale, also if its cells are still free."""
    with make(8) as cache:
        scene = KeyScene(cache)
        scene.store(0, range(4))
        plan = scene.plan(0, [4])
        assert plan is not None
        cache.seq_add(0, 2, 4, 6)
        with pytest.raises(ParamError, match="plan the batch anew"):
            plan.apply(0)
        assert scene.check(0, NEAR["f32"]) == [(0, 0), (1, 1), (8, 2), (9, 3)]


N_SEQ = 3
POS = st.integers(-1, 14)
SEQ = st.integers(0, N_SEQ - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), SEQ, st.integers(1, 4)),
        st.tuples(st.just("seq_add"), SEQ, POS, POS, st.integers(-6, 6)),
        st.tuples(st.just("seq_div"), SEQ, POS, POS, st.integers(1, 3)),
        st.tuples(st.just("seq_cp"), SEQ, SEQ, POS, POS),
        st.tuples(st.just("seq_rm"), st.integers(-1, N_SEQ - 1), POS, POS),
        st.tuples(st.just("seq_keep"), SEQ),
        st.tuples(st.just("update")),
    ),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize(("unified", "dtype"), [(True, "f32"), (False, "f16")])
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_any_queue_of_moves_copies_and_removals(unified: bool, dtype: str, steps: list[tuple]) -> None:
    n_cells = 24 if unified else 9
    naive = NaiveSequences(N_SEQ, n_cells, unified)
    with make(n_cells, 2, dtype, n_seq_max=N_SEQ, unified=unified, v_trans=not unified) as cache:
        scene, token = KeyScene(cache, wavy), 0
        for verb, *args in [("store", 0, 4), ("store", 1, 2), *steps]:
            if verb == "store":
                token = stored(scene, naive, token, *args)
            elif verb == "update":
                cache.update()
            else:
                tell_both(cache, naive, verb, args)
        near = NEAR[dtype] * (1 if dtype == "f32" else 2)  # each update may round once more
        for s in range(N_SEQ):
            assert sorted(scene.check(s, near)) == naive.rows(s)


def stored(scene: KeyScene, naive: NaiveSequences, token: int, seq: int, n: int) -> int:
    """Store what fits behind a sequence; returns the next new token."""
    n = min(n, naive.n_free(seq))
    start = max((one.pos for one in naive.held[seq]), default=-1) + 1
    if n:
        scene.store(seq, range(start, start + n), range(token, token + n))
    for i in range(n):
        naive.store(seq, start + i, token + i)
    return token + n


def tell_both(cache: KVCache, naive: NaiveSequences, verb: str, args: list[int]) -> None:
    """Carry out a verb on both; what the model has no room for, the cache refuses and leaves as it was."""
    if getattr(naive, verb)(*args) is not False:
        getattr(cache, verb)(*args)
        return
    before = state(cache.streams)
    with pytest.raises((ShiftUnsupported, NoSlotError)):
        getattr(cache, verb)(*args)
    assert state(cache.streams) == before
