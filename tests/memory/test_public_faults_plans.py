"""Context shift and chunk reuse carried out on stored keys: faults that users reported, named after their symptoms."""

from __future__ import annotations

import numpy as np
import pytest
from support.apply_plans import apply_reuse, apply_step
from support.key_scene import NEAR, KeyScene, one, raw_rows, snapshot, toy_spec, wavy

from pykv.batch import Batch, BatchLimits, validate
from pykv.errors import ContextLengthExceeded, ParamError
from pykv.memory import KVCache
from pykv.policies import plan_reuse, plan_shift


def make(n_cells: int, dtype: str = "f32", **more) -> KVCache:
    return KVCache(toy_spec(), n_cells=n_cells, type_k=dtype, type_v=dtype, n_threads=1, **more)


def occupied(cache: KVCache) -> str:
    return " ".join(cell for cell in cache.dump().split() if not cell.endswith("."))


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


# case A03, ggml-org/llama.cpp#12160


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("raw", [one, wavy])
def test_the_second_cut_removed_cells_that_were_still_wanted(raw, dtype: str) -> None:
    with make(16, dtype) as cache:
        scene = KeyScene(cache, raw)
        scene.store(0, range(9), ids("abcdefghj"))
        reuse = plan_reuse(ids("abcdefghj"), ids("abefhj"), 2)
        apply_reuse(cache, reuse)
        assert occupied(cache).replace("{0}", "") == "0:0 1:1 4:2 5:3 7:4 8:5"
        assert cache.cells().n_used == 6
        assert scene.check(0, NEAR[dtype]) == list(enumerate(ids("abefhj")))
        cache.seq_rm(0, reuse.n_usable, -1)
        scene.store(0, [5], ids("j"))
        assert scene.check(0, NEAR[dtype]) == list(enumerate(ids("abefhj")))


def test_nothing_is_left_behind_what_was_reused() -> None:
    with make(16) as cache:
        scene = KeyScene(cache)
        scene.store(0, range(8), ids("ABCDEFGH"))
        apply_reuse(cache, plan_reuse(ids("ABCDEFGH"), ids("ABEFXGH"), 2))
        assert scene.check(0, NEAR["f32"]) == list(enumerate(ids("ABEF")))
        scene.store(0, range(4, 7), ids("XGH"))
        assert scene.check(0, NEAR["f32"]) == list(enumerate(ids("ABEFXGH")))


@pytest.mark.parametrize("min_chunk", [1, 2, 4])
def test_many_cuts_of_a_forked_text_leave_the_sibling_alone(min_chunk: int) -> None:
    """The cells are shared: those that move are copied first."""
    rng = np.random.default_rng(min_chunk)
    cached = rng.integers(0, 5, 40).tolist()
    prompt = [token for i, token in enumerate(cached) if i % 11 not in (3, 4, 9)]
    with make(96, n_seq_max=2) as cache:
        scene = KeyScene(cache, wavy)
        scene.store(0, range(40), cached)
        cache.seq_cp(0, 1)
        before = cache.k(0, 1).tobytes()
        reuse = plan_reuse(cached, prompt, min_chunk)
        assert reuse.moves
        apply_reuse(cache, reuse)
        assert scene.check(0, NEAR["f32"]) == list(enumerate(prompt[: reuse.n_matched]))
        assert scene.check(1, NEAR["f32"]) == list(enumerate(cached))
        assert cache.k(0, 1).tobytes() == before


# case A04, ggml-org/llama.cpp PR #5622


@pytest.mark.parametrize("dtype", NEAR)
def test_a_context_shift_lost_one_token_too_many(dtype: str) -> None:
    with make(16, dtype) as cache:
        scene = KeyScene(cache)
        scene.store(0, range(16))
        shift = plan_shift(16, 16, 4)
        assert (shift.removed, shift.moved, shift.delta) == ((4, 10), (10, 16), -6)
        apply_step(cache, shift)
        assert cache.cells().n_used == cache.pos_max(0) + 1 == 10
        assert scene.check(0, NEAR[dtype]) == list(enumerate([0, 1, 2, 3, *range(10, 16)]))


@pytest.mark.parametrize("n_discard", [0, 1, 3, 100])
def test_whatever_is_kept_is_kept_to_the_byte(n_discard: int) -> None:
    with make(16, "f16") as cache:
        scene = KeyScene(cache, wavy)
        for n_keep in range(15):
            cache.clear()
            scene.store(0, range(16))
            before = raw_rows(cache)[0]
            shift = plan_shift(16, 16, n_keep, n_discard)
            apply_step(cache, shift)
            survivors = [*range(n_keep), *range(n_keep + shift.n_discard, 16)]
            assert scene.check(0, NEAR["f16"]) == list(enumerate(survivors))
            after = raw_rows(cache)[0]
            assert np.array_equal(after[0][:n_keep], before[0][:n_keep])
            assert np.array_equal(after[1], before[1])


# case A05, ggml-org/llama.cpp#3969


@pytest.mark.parametrize("n", [11, 15])
def test_a_prompt_longer_than_its_share_was_shifted_for_ever(n: int) -> None:
    """Four sequences share 40 cells: each has 10."""
    with make(10, n_seq_max=4, unified=False) as cache:
        before = snapshot(cache)
        batch = validate(Batch([1] * n), BatchLimits(n_tokens_max=40, n_vocab=2, n_seq_max=4), cache)
        for n_ubatch in (4, 40):
            with pytest.raises(ContextLengthExceeded, match=f"sequence 0 brings {n} tokens; its share .* 10 cells"):
                cache.init_batch(batch, n_ubatch)
        assert snapshot(cache) == before
        KeyScene(cache).store(0, range(10))
        assert [cache.cells(s).n_used for s in range(4)] == [10, 0, 0, 0]


def test_one_of_several_prompts_is_longer_than_its_share() -> None:
    with make(10, n_seq_max=4, unified=False) as cache:
        scene = KeyScene(cache)
        scene.store(1, range(6))
        before = snapshot(cache)
        batch = Batch([1] * 17, seq_id=[0] * 3 + [2] * 11 + [3] * 3)
        valid = validate(batch, BatchLimits(n_tokens_max=40, n_vocab=2, n_seq_max=4), cache)
        with pytest.raises(ContextLengthExceeded, match="sequence 2 brings 11"):
            cache.init_batch(valid, 8)
        assert snapshot(cache) == before


def generate(scene: KeyScene, n_prompt: int, n_keep: int, n: int) -> tuple[list[int], list[int]]:
    """Store a prompt and `n` more tokens, shifting when full; returns when it shifted, and the tokens left."""
    cache, shifts = scene.cache, []
    scene.store(0, range(n_prompt))
    held = list(range(n_prompt))
    for i in range(n):
        if len(held) == cache.n_cells:
            shift = plan_shift(len(held), cache.n_cells, n_keep)
            apply_step(cache, shift)
            del held[shift.removed[0] : shift.removed[1]]
            shifts.append(i)
        scene.store(0, [len(held)], [n_prompt + i])
        held.append(n_prompt + i)
    return shifts, held


def test_generation_without_limit_shifted_for_ever() -> None:
    with make(16) as cache:
        scene = KeyScene(cache)
        shifts, held = generate(scene, 4, 4, 100)
        assert shifts == list(range(12, 100, 6))
        assert (len(shifts), len(held)) == (15, 14)
        assert scene.check(0, NEAR["f32"]) == list(enumerate(held))
        assert held[:4] == [0, 1, 2, 3]
        assert held[4:] == list(range(94, 104))


def test_a_prompt_that_leaves_nothing_to_discard_was_shifted_for_ever() -> None:
    with make(16) as cache:
        scene = KeyScene(cache)
        with pytest.raises(ContextLengthExceeded, match="cannot shift"):
            generate(scene, 15, 15, 5)
        assert scene.check(0, NEAR["f32"]) == list(enumerate(range(16)))
        assert not cache.cells().shift.any()


def test_more_to_keep_than_the_context_holds() -> None:
    with pytest.raises(ParamError, match=r"n_keep = 20: must be an integer from 0 to 16"):
        plan_shift(16, 16, 20)
