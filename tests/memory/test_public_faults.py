"""Faults that users of such systems reported, on a cache with its data; tests are named after symptoms.

Here: what a memory must refuse, and refuse whole. Moved positions, plans, streams, attention and quantised keys have
files beside this one.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.key_scene import KeyScene, snapshot, wavy
from support.kv_scene import plan_batch, run, store_positions
from support.told_text import answer

from pykv.cells import SwaType, Window
from pykv.errors import BatchError, ContextLengthExceeded, PykvError, SequenceError, ShiftUnsupported
from pykv.ggml import RopeParams
from pykv.memory import KVCache, LayerSpec, MemorySpec

LAYER = LayerSpec(1, 64, 64)
ROPE = LayerSpec(1, 64, 64, RopeParams(64))


def make(n_cells: int, layer: LayerSpec = LAYER, dtype: str = "f32", window: Window | None = None, **more) -> KVCache:
    spec = MemorySpec((layer,), **({"window": window} if window else {}))
    return KVCache(spec, n_cells=n_cells, type_k=dtype, type_v=dtype, n_threads=1, **more)


# case A02, ggml-org/llama.cpp#13983


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    ("p0", "p1", "left"),
    [(1, -1, [0]), (-1, -1, []), (-1, 2, [2, 3]), (0, -7, []), (2, 3, [0, 1, 3]), (2, 2, [0, 1, 2, 3]), (9, -1, None)],
)
def test_removing_from_any_sequence_stopped_working(p0: int, p1: int, left: list[int] | None, unified: bool) -> None:
    """Open ends, in one stream and in several, with a cell that two sequences share and a shift that is pending."""
    with make(12, ROPE, n_seq_max=3, unified=unified) as cache:
        scene = KeyScene(cache, wavy)
        for s in (0, 1):
            scene.store(s, range(4), range(4 * s, 4 * s + 4))
        cache.seq_cp(0, 2)
        cache.seq_add(1, 3, 4, 5)
        cache.seq_add(1, 8, 9, -5)
        before = [p for p, _ in scene.held(0)]
        assert cache.seq_rm(-1, p0, p1) is True
        left = before if left is None else left
        for s, first in ((0, 0), (1, 4), (2, 0)):
            assert scene.check(s, 1e-5) == [(p, first + p) for p in left]
            assert (cache.pos_min(s), cache.pos_max(s)) == ((left[0], left[-1]) if left else (-1, -1))
        next_pos = left[-1] + 1 if left else 0
        scene.store(1, [next_pos], [99])
        assert scene.check(1, 1e-5) == [*((p, 4 + p) for p in left), (next_pos, 99)]


@pytest.mark.parametrize("unified", [True, False])
def test_a_wildcard_where_there_is_none(unified: bool) -> None:
    with make(8, ROPE, n_seq_max=2, unified=unified) as cache:
        KeyScene(cache, wavy).store(0, range(4))
        before = snapshot(cache)
        for verb, args in (
            ("seq_rm", (-2, 0, -1)), ("seq_rm", (2, 0, -1)), ("seq_cp", (-1, 1)), ("seq_cp", (0, -1)),
            ("seq_cp", (0, 2)), ("seq_keep", (-1,)), ("seq_add", (-1, 0, -1, 1)), ("seq_div", (-1, 0, -1, 2)),
        ):  # fmt: skip
            with pytest.raises(SequenceError):
                getattr(cache, verb)(*args)
            assert snapshot(cache) == before


# case A12, ggml-org/llama.cpp PR #12695


def test_a_refused_batch_left_holes_in_a_window_cache() -> None:
    """Its first parts would take cells out of the window, and throw away what is older; the last finds none."""
    size = {"n_cells": 6, "window": Window(2, SwaType.STANDARD), "n_seq_max": 7}
    with make(**size) as cache, make(**size) as twin:
        for one in (cache, twin):
            answer(one, run(0, range(5)))
        before = snapshot(cache)
        tokens = [(0, 5), (0, 6), *((s, 0) for s in range(1, 7))]
        for n_ubatch in (1, 2, 3, 8):
            assert plan_batch(cache, tokens, n_ubatch) is None
            assert snapshot(cache) == before
        ours, theirs = (answer(one, tokens[:-1], n_ubatch=2) for one in (cache, twin))
        assert np.array_equal(ours, theirs)
        assert snapshot(cache) == snapshot(twin)


VERBS = st.one_of(
    st.tuples(st.just("seq_rm"), st.integers(-1, 2), st.integers(-1, 5), st.integers(-1, 6)),
    st.tuples(st.just("seq_cp"), st.integers(0, 2), st.integers(0, 2), st.integers(-1, 5), st.integers(-1, 6)),
    st.tuples(st.just("seq_add"), st.integers(0, 2), st.integers(0, 5), st.just(-1), st.integers(-3, 3)),
)


@settings(max_examples=40, deadline=None)
@given(
    unified=st.booleans(),
    verbs=st.lists(VERBS, max_size=4),
    n_ubatch=st.integers(1, 6),
    order=st.permutations(range(3)),
)
def test_a_batch_that_does_not_fit_changes_nothing_after_any_history(unified, verbs, n_ubatch, order) -> None:
    with make(10, ROPE, n_seq_max=3, unified=unified) as cache:
        scene = KeyScene(cache, wavy)
        for s, n in ((0, 4), (1, 3)):
            scene.store(s, range(n))
        for verb, *args in verbs:
            try:
                getattr(cache, verb)(*args)
            except PykvError:
                continue
        before = snapshot(cache)
        ends = [cache.pos_max(s) + 1 for s in range(3)]
        free = [10 - cache.cells(cache.streams.stream_of(s)).n_used for s in range(3)]
        too_much = order[-1]
        sizes = {s: free[s] + 1 if s == too_much else min(1, free[s]) for s in order}
        tokens = [(s, ends[s] + i) for s in order for i in range(sizes[s])]
        if free[too_much] == 10:  # no smaller batch would help
            with pytest.raises(ContextLengthExceeded):
                plan_batch(cache, tokens, n_ubatch)
        else:
            assert plan_batch(cache, tokens, n_ubatch) is None
        assert snapshot(cache) == before
        cache.check()


# case A14, ggml-org/llama.cpp#17316


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    ("tokens", "at_fault", "last", "first"),
    [
        ([(0, 4), (1, 6), (2, 5)], 2, 2, 5),
        ([(0, 4), (1, 3), (2, 3)], 1, 5, 3),
        ([(0, 3), (1, 6), (2, 3)], 0, 3, 3),
        ([(0, 4), (0, 6), (1, 6), (2, 3)], 0, 3, 4),
        ([(0, 4), (1, 7), (1, 6), (2, 3)], 1, 5, 6),
    ],
)
def test_one_sequence_out_of_step_failed_all_of_them(tokens, at_fault, last, first, unified: bool) -> None:
    with make(16, ROPE, n_seq_max=3, unified=unified) as cache:
        scene = KeyScene(cache, wavy)
        for s, n in ((0, 4), (1, 6), (2, 3)):
            scene.store(s, range(n))
        before = snapshot(cache)
        with pytest.raises(BatchError, match=f"sequence {at_fault}: ") as caught:
            plan_batch(cache, tokens)
        assert (caught.value.seq_id, caught.value.last, caught.value.first) == (at_fault, last, first)
        assert snapshot(cache) == before
        assert [cache.pos_max(s) for s in range(3)] == [3, 5, 2]
        others = [one for one in tokens if one[0] != at_fault]
        store_positions(cache, others)
        ends = {0: 3, 1: 5, 2: 2} | dict(others)
        assert [cache.pos_max(s) for s in range(3)] == list(ends.values())
        if unified:
            assert cache.dump().split()[13:] == [f"{13 + i}:{p}{{{s}}}" for i, (s, p) in enumerate(others)]


def test_where_a_sequence_ends_after_verbs() -> None:
    """The next position is told from what is stored now."""
    with make(16, ROPE, n_seq_max=2) as cache:
        scene = KeyScene(cache, wavy)
        scene.store(0, range(6))
        cache.seq_rm(0, 4, -1)
        cache.seq_add(0, 2, -1, 5)
        with pytest.raises(BatchError) as caught:
            plan_batch(cache, [(0, 6)])
        assert (caught.value.seq_id, caught.value.last, caught.value.first) == (0, 8, 6)
        scene.store(0, [9])
        cache.seq_div(0, 0, -1, 2)
        with pytest.raises(BatchError) as caught:
            plan_batch(cache, [(1, 0), (0, 10)])
        assert (caught.value.seq_id, caught.value.last, caught.value.first) == (0, 4, 10)
        scene.store(0, [5], [70])
        assert scene.check(0, 1e-5)[-1] == (5, 70)


# case A19, ggml-org/llama.cpp#13865, PR #19928; JamePeng/llama-cpp-python#70


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (MemorySpec((ROPE,), n_pos_per_embd=4), "multi_dim_positions"),
        (MemorySpec((ROPE,), n_pos_per_embd=2), "multi_dim_positions"),
        (MemorySpec((LAYER,), absolute_positions=True), "absolute_positions"),
    ],
)
def test_tokens_that_cannot_be_moved_were_moved_or_ended_the_process(spec: MemorySpec, reason: str, unified) -> None:
    with KVCache(spec, n_cells=8, type_k="f32", type_v="f32", n_seq_max=2, unified=unified, n_threads=1) as cache:
        scene = KeyScene(cache, wavy)
        scene.store(0, range(6))
        support = cache.can_shift()
        assert (bool(support), support.reason) == (False, reason)
        before = snapshot(cache)
        for verb, args in (
            ("seq_add", (0, 2, 6, -2)), ("seq_div", (0, 0, 6, 2)), ("seq_add", (0, 0, 0, 1)),
            ("seq_add", (1, 0, -1, 1)), ("seq_div", (0, 0, -1, 1)), ("seq_add", (0, 0, -1, 0)),
        ):  # fmt: skip
            with pytest.raises(ShiftUnsupported, match=reason) as caught:
                getattr(cache, verb)(*args)
            assert caught.value.reason == reason
            assert snapshot(cache) == before
        scene.store(0, [6])
        assert scene.check(0, 1e-5) == [(p, p) for p in range(7)]
        scene.store(0, [7])
        full = snapshot(cache)
        assert scene.plan(0, [8]) is None
        assert snapshot(cache) == full
        cache.seq_cp(0, 1)  # the other verbs serve it as well
        cache.seq_keep(1)
        cache.seq_rm(1, 4, -1)
        assert scene.check(1, 1e-5) == [(p, p) for p in range(4)]
