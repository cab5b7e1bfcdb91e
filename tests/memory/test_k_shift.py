"""Keys that were moved equal keys that are written at the new positions, as float64 and the papers have them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.moved_keys import MovedKeys, rope_factors
from support.row_writer import rotated

from pykv.ggml import RopeParams, Tensor
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySpec, row_mover
from pykv.memory.row_engine import RowEngine
from pykv.memory.row_follower import in_groups
from pykv.memory.row_mover import RowMover

FLOATS = ("f32", "f16", "bf16")
BLOCKS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
TYPES = FLOATS + BLOCKS
# of 64 and 128 quantised K is stored under a Hadamard rotation, of 32 not; no block divides 80
CASES = [(dtype, head) for dtype in TYPES for head in (32, 64, 80, 128) if head % 32 == 0 or dtype in FLOATS]
YARN = {"n_ctx_orig": 256, "freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9}


def layers(head: int, factors: Tensor | None = None) -> tuple[LayerSpec, ...]:
    """Return layers that rotate in every way there is, and one that does not."""
    ropes = (
        RopeParams(head),
        RopeParams(head // 2, "neox", freq_base=500.0),
        RopeParams(head // 2, freq_scale=0.25),
        RopeParams(head, "neox", **YARN),
        None,
        RopeParams(head // 4, freq_base=1e6, attn_factor=1.3, **{k: v for k, v in YARN.items() if k != "attn_factor"}),
    )
    plain = tuple(LayerSpec(2, head, 32, rope) for rope in ropes)
    return (*plain, LayerSpec(2, head, 32, RopeParams(head // 2, "neox"), factors)) if factors else plain


def make(spec: MemorySpec, n_cells: int = 64, **settings) -> KVCache:
    return KVCache(spec, KVSettings(n_cells, **settings), n_threads=1)


@pytest.fixture(scope="module")
def factors() -> Iterator[Tensor]:
    with rope_factors(np.linspace(1, 8, 32).tolist()) as tensor:
        yield tensor


def wander(keys: MovedKeys, rng: np.random.Generator, n_verbs: int) -> None:
    """Move and divide at random; nothing falls below 0, nothing goes far."""
    for _ in range(n_verbs):
        p0 = int(rng.integers(0, keys.pos.max() + 1))
        p1 = int(rng.choice([-1, p0 + 1, p0 + 10]))
        if rng.random() < 0.15:
            keys.div(p0, p1, int(rng.integers(2, 5)))
        else:
            keys.add(p0, p1, int(rng.integers(-min(p0, 15), 16 if keys.pos.max() < 100 else 1)))


@pytest.mark.parametrize(("dtype", "head"), CASES)
def test_moved_keys_equal_fresh_ones(dtype: str, head: int, factors: Tensor) -> None:
    """One move; several before an update; back and forth over three updates."""
    rng = np.random.default_rng(head)
    with make(MemorySpec(layers(head, factors)), type_k=dtype) as cache:
        keys = MovedKeys(cache, 40)
        keys.check(dtype)
        keys.add(10, -1, 7)
        keys.check(dtype)
        for n_verbs in (6, 12):
            wander(keys, rng, n_verbs)
            keys.check(dtype)


@pytest.mark.parametrize("seed", range(6))
def test_long_histories(seed: int, factors: Tensor) -> None:
    rng = np.random.default_rng(seed)
    with make(MemorySpec(layers(64, factors)), type_k="f32") as cache:
        keys = MovedKeys(cache, 48, seed)
        for _ in range(12):
            wander(keys, rng, int(rng.integers(1, 8)))
            keys.update()
        keys.check("f32")


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
@pytest.mark.parametrize("deltas", ["one", "two", "all different"])
def test_more_rows_than_are_turned_at_once(monkeypatch: pytest.MonkeyPatch, deltas: str, dtype: str) -> None:
    spec = MemorySpec(layers(64))
    monkeypatch.setattr(row_mover, "CHUNK_BYTES", 7 * 4 * spec.layers[0].n_embd_k)
    with make(spec, 128, type_k=dtype) as cache:
        keys = MovedKeys(cache, 100)
        keys.add(3, -1, 5)
        if deltas == "two":
            keys.add(50, -1, 2)
        elif deltas == "all different":
            for p in range(107, 7, -3):
                keys.add(p, -1, 1)
        keys.check(dtype)


@given(
    deltas=st.lists(st.sampled_from([-40, -1, 1, 2, 3, 100, 2**31 - 1]) | st.integers(-50, 50), max_size=200),
    n_at_once=st.integers(1, 70),
)
def test_groups_hold_every_row_once_with_its_delta(deltas: list[int], n_at_once: int) -> None:
    rows = np.random.default_rng(1).permutation(1000)[: len(deltas)].astype(np.int64)
    wanted = dict(zip(rows.tolist(), deltas, strict=True))
    found: dict[int, int] = {}
    for some, delta in in_groups(rows, np.array(deltas, np.int32), n_at_once):
        assert 1 <= some.size <= n_at_once
        assert delta.size in (1, some.size)
        part = dict(zip(some.tolist(), np.broadcast_to(delta, some.size).tolist(), strict=True))
        assert not found.keys() & part.keys()
        found |= part
    assert found == wanted


def bytes_by_row(cache: KVCache) -> np.ndarray:
    """Return (n_layer, n_rows, bytes) of K."""
    ks = [cache.store.tensors(il)[0] for il in range(len(cache.spec.layers))]
    return np.array([k.raw_bytes().reshape(k.ne[1] * k.ne[2], -1) for k in ks])


def bytes_of_v(cache: KVCache) -> list[bytes]:
    return [cache.store.tensors(il)[1].raw_bytes().tobytes() for il in range(len(cache.spec.layers))]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_shift_multiplied_every_key_by_yarns_magnitude(dtype: str) -> None:
    """In the reference also keys that were not moved; here those, and all values, are as they were to the bit."""
    with make(MemorySpec(layers(64)), type_k=dtype, type_v="f16") as cache:
        keys = MovedKeys(cache, 40)
        before, values = bytes_by_row(cache), bytes_of_v(cache)
        keys.add(10, 20, 3)
        keys.add(30, 35, 90)
        keys.update()
        has_moved = np.zeros(64, np.bool_)
        has_moved[10:20] = has_moved[30:35] = True
        after = bytes_by_row(cache)
        assert np.array_equal(before[:, ~has_moved], after[:, ~has_moved])
        assert bytes_of_v(cache) == values
        for il, layer in enumerate(cache.spec.layers):
            changed = (before[il] != after[il]).any(axis=1)
            assert changed[has_moved].all() == (layer.rope is not None)


def test_a_move_there_and_back_turns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(MemorySpec(layers(64)), type_k="q4_0") as cache:
        keys = MovedKeys(cache, 40)
        before = bytes_by_row(cache)
        monkeypatch.setattr(RowEngine, "run", lambda *_: pytest.fail("it computed"))
        keys.add(5, -1, 9)
        keys.add(20, -1, 3)
        keys.add(14, -1, -4)
        keys.add(19, -1, -3)
        keys.add(10, -1, -5)
        keys.update()
        assert keys.pos.tolist() == list(range(40))
        assert np.array_equal(bytes_by_row(cache), before)
        assert not cache.streams.has_shift


def test_ten_thousand_single_shifts() -> None:
    """Also with YaRN, whose magnitude would have grown to the ten thousandth power."""
    spec = MemorySpec((LayerSpec(1, 64, 32, RopeParams(64)), LayerSpec(1, 64, 32, RopeParams(64, "neox", **YARN))))
    with make(spec, type_k="f32") as cache:
        keys, mover = MovedKeys(cache, 4), RowMover(cache.store, 1)
        rows, delta = np.arange(4), np.ones(1, np.int32)
        for _ in range(10_000):
            mover.turn(rows, delta)
        mover.close()
        keys.pos += 10_000
        assert max(keys.off(il).max() for il in (0, 1)) <= 1e-3


@pytest.mark.parametrize("alibi", [0.0, 8.0])
def test_keys_without_rotary_positions_stay(monkeypatch: pytest.MonkeyPatch, alibi: float) -> None:
    monkeypatch.setattr(RowEngine, "run", lambda *_: pytest.fail("it computed"))
    with make(MemorySpec.uniform(2, LayerSpec(1, 64, 32), alibi_max_bias=alibi), type_k="q8_0") as cache:
        keys = MovedKeys(cache, 20)
        before = bytes_by_row(cache)
        keys.add(5, -1, 9)
        keys.div(0, -1, 2)
        keys.update()
        assert np.array_equal(bytes_by_row(cache), before)
        assert sorted(cache.cells().pos[:20].tolist()) == sorted(keys.pos.tolist())


@pytest.mark.parametrize("d", [2, 3, 7, 1000])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_divided_keys_lie_at_the_quotients(dtype: str, d: int) -> None:
    with make(MemorySpec(layers(64)), type_k=dtype) as cache:
        keys = MovedKeys(cache, 40)
        keys.div(0, -1, d)
        assert keys.pos.tolist() == [p // d for p in range(40)]
        keys.check(dtype)


def test_division_turned_keys_the_wrong_way() -> None:
    """With `reference_moves` as in the reference: by old - new, away from where they belong."""
    with make(MemorySpec(layers(64)), type_k="f32", reference_moves=True) as cache:
        keys = MovedKeys(cache, 40)
        keys.add(30, -1, 4)
        keys.update()
        old = keys.pos.copy()
        keys.div(8, -1, 2)
        for il, layer in enumerate(cache.spec.layers):
            wrong = rotated(layer, keys.raw[il][0], old + (old - keys.pos))
            ours = cache.k(il, 0)[np.argsort(np.argsort(keys.pos, kind="stable"))]
            magnitude = np.abs(wrong).max()
            np.testing.assert_allclose(ours, wrong, atol=1e-5 * magnitude)


def test_what_falls_below_zero_is_gone_and_the_rest_is_right() -> None:
    with make(MemorySpec(layers(64)), type_k="f32") as cache:
        keys = MovedKeys(cache, 20)
        cache.seq_add(0, 0, -1, -6)
        keys.pos = keys.pos[6:] - 6
        keys.raw = [(k[6:], v[6:]) for k, v in keys.raw]
        keys.check("f32")
