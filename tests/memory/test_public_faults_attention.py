"""What a query sees, and what it answers, as users found it wrong; tests are named after symptoms."""

from __future__ import annotations

import numpy as np
import pytest
from support.kv_scene import run, store_positions
from support.naive_attention import NaiveKV
from support.nmse import nmse
from support.told_text import answer, expected, told

from pykv.cells import NO_WINDOW, SwaType, Window
from pykv.memory import AttentionPath, KVCache, LayerSpec, MemorySpec


def make(n_cells: int, dtype: str = "f32", window: Window = NO_WINDOW, **more) -> KVCache:
    """Return a cache of one layer without RoPE."""
    spec = MemorySpec((LayerSpec(1, 64, 64),), window=window)
    return KVCache(spec, n_cells=n_cells, type_k=dtype, type_v=dtype, n_threads=1, **more)


# case A09, ml-explore/mlx-lm PR #390; huggingface/transformers#39408


def hidden(kind: SwaType, n_swa: int):
    """Return which keys a window hides, as the papers tell it."""
    if kind is SwaType.STANDARD:
        return lambda p0, p1: p0 not in range(p1 - n_swa + 1, p1 + 1)
    return lambda p0, p1: p0 // n_swa < p1 // n_swa


@pytest.mark.parametrize("path", AttentionPath)
@pytest.mark.parametrize("n_swa", [1, 2, 4, 9, 10, 30])
@pytest.mark.parametrize("kind", [SwaType.STANDARD, SwaType.CHUNKED])
def test_prompt_and_generation_disagreed_at_the_edge_of_the_window(
    kind: SwaType, n_swa: int, path: AttentionPath
) -> None:
    window = Window(n_swa, kind)
    with make(16, window=window) as whole, make(16, window=window) as steps, make(16, window=window) as parts:
        at_once = answer(whole, run(0, range(10)), path)
        stepwise = np.concatenate([answer(steps, [(0, p)], path) for p in range(10)])
        in_parts = answer(parts, run(0, range(10)), path, n_ubatch=3)
        wanted = expected(0, range(10), 64, hidden(kind, n_swa))
        for name, one in (("whole", at_once), ("stepwise", stepwise), ("in parts", in_parts)):
            # the fused path sums f16; a key too many or too few costs more than 1e-3
            assert nmse(one, wanted) < (1e-5 if path is AttentionPath.FLASH else 1e-12), name


def test_a_window_counts_the_query_itself() -> None:
    with make(16, window=Window(4, SwaType.STANDARD)) as cache:
        store_positions(cache, run(0, range(10)))
        seen = {p: cache.visible(0, p)["standard"].tolist() for p in (3, 4, 9)}
        assert seen == {3: [0, 1, 2, 3], 4: [1, 2, 3, 4], 9: [6, 7, 8, 9]}
    with make(16, window=Window(4, SwaType.CHUNKED)) as cache:
        store_positions(cache, run(0, range(10)))
        seen = {p: cache.visible(0, p)["chunked"].tolist() for p in (3, 4, 7, 8, 9)}
        assert seen == {3: [0, 1, 2, 3], 4: [4], 7: [4, 5, 6, 7], 8: [8], 9: [8, 9]}


def test_a_window_went_by_cells_after_a_shift() -> None:
    """Neighbours in position lie far apart, and cells out of the window are used again. Keys without RoPE."""
    with make(8, window=Window(4, SwaType.STANDARD)) as cache:
        answer(cache, run(0, range(8)))
        cache.seq_rm(0, 2, 4)
        cache.seq_add(0, 4, 8, -2)
        got = answer(cache, run(0, range(6, 8)))
        assert cache.dump() == "0:6{0} 1:7{0} 2:. 3:. 4:2{0} 5:3{0} 6:4{0} 7:5{0}"
        naive = NaiveKV(1 / 8, hidden=hidden(SwaType.STANDARD, 4))
        for p, told_as in enumerate([0, 1, 4, 5, 6, 7, 6, 7]):
            naive.store(0, p, *told(0, told_as, 64)[1:])
        assert nmse(got, np.array([naive.attend(0, p, told(0, p, 64)[0]) for p in (6, 7)])) < 1e-12
        assert cache.visible(0, 7)["standard"].tolist() == [4, 5, 6, 7]
        answer(cache, run(0, range(8, 11)))
        assert cache.visible(0, 10)["standard"].tolist() == [7, 8, 9, 10]


# case A15, ggml-org/llama.cpp#4113, #6173, PR #5658

NEAR_F32, NEAR_F16 = 1e-6, 5e-4
"""NMSE against f32 in numpy."""


@pytest.mark.parametrize("path", AttentionPath)
@pytest.mark.parametrize(("dtype", "near"), [("f32", NEAR_F32), ("f16", NEAR_F16), ("q8_0", NEAR_F16)])
def test_the_answer_depended_on_cells_and_padding(dtype: str, near: float, path: AttentionPath) -> None:
    if dtype == "q8_0" and path is AttentionPath.GROUPED:
        path = AttentionPath.FLASH  # quantised V has no other
    wanted = expected(1, range(5), 64)
    answers = []
    for order in ((0, 1), (1, 0)):
        for n_kv in (64, 96, 256):
            with make(256, dtype=dtype, n_seq_max=2) as cache:
                for s in order:
                    n_ubatch = 16 if path is AttentionPath.FUSED else 512
                    got = answer(cache, run(s, range(34 if s == 0 else 5)), path, n_kv=n_kv, n_ubatch=n_ubatch)
                    answers += [got] if s == 1 else []
                cells = np.flatnonzero(cache.streams.cells[0].member(1)).tolist()
                assert cells == (list(range(34, 39)) if order == (0, 1) else list(range(5)))
    for got in answers:
        assert nmse(got, wanted) <= near
        assert np.abs(got - answers[0]).max() <= (1e-5 if (dtype, path) == ("f32", AttentionPath.GROUPED) else 1e-2)


@pytest.mark.parametrize("path", AttentionPath)
@pytest.mark.parametrize("seed", range(4))
def test_scattered_cells_answer_like_a_run_of_cells(seed: int, path: AttentionPath) -> None:
    """Other sequences come and go between the tokens of one."""
    rng = np.random.default_rng(seed)
    with make(48, n_seq_max=4) as cache:
        ends, answers = [0] * 4, []
        while ends[1] < 12:
            s = int(rng.integers(0, 4))
            if s != 1 and rng.random() < 0.4:
                cache.seq_rm(s)
                ends[s] = 0
            n = int(rng.integers(1, 4))
            got = answer(cache, run(s, range(ends[s], ends[s] + n)), path)
            ends[s] += n
            answers += [got] if s == 1 else []
        wanted = expected(1, range(ends[1]), 64)
        assert nmse(np.concatenate(answers), wanted) <= (1e-12 if path is AttentionPath.GROUPED else NEAR_F32)
