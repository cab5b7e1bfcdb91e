"""States that do not fit as they are: converted when asked, without loss or with what was lost said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.kv_scene import KVScene, run
from support.state_io import load, saved
from support.state_kinds import decode, fill, make, scribble

from pykv.errors import StateError
from pykv.memory import AttentionPath, KVCache, LayerSpec, MemorySpec
from pykv.memory.state_convert import lost
from pykv.state_format import Dialect

SPEC = MemorySpec((LayerSpec(2, 64, 64), LayerSpec(2, 64, 64)))
N = 30


def cache_of(**settings: Any) -> KVCache:
    return KVCache(SPEC, n_cells=64, n_seq_max=2, n_threads=1, **settings)


def filled(**settings: Any) -> KVCache:
    """Return a cache with random keys and values of two sequences that alternate."""
    cache = cache_of(**settings)
    scene = KVScene(cache, AttentionPath.FLASH, n_head=4)
    for i in range(0, N, 3):
        scene.step([*run(0, range(i, i + 3)), *run(1, range(i, i + 3))])
    return cache


def rows(cache: KVCache, seq_id: int) -> list[np.ndarray]:
    return [read(il, seq_id) for il in range(2) for read in (cache.k, cache.v)]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("v_trans", [True, False])
@pytest.mark.parametrize("seq_id", [-1, 0, 1])
def test_v_by_the_other_order_is_lossless(v_trans: bool, unified: bool, seq_id: int) -> None:
    with filled(v_trans=v_trans, unified=unified) as source, cache_of(v_trans=not v_trans, unified=unified) as target:
        blob = saved(source, seq_id)
        with pytest.raises(StateError, match="V"):
            load(target, blob, seq_id)
        done = load(target, blob, seq_id, convert=True)
        target.check()
        assert done.is_lossless
        assert done.what == (("V by channel → by cell",) if v_trans else ("V by cell → by channel",))
        for s in (0, 1) if seq_id == -1 else (seq_id,):
            assert all(map(np.array_equal, rows(target, s), rows(source, s)))


@pytest.mark.parametrize("kind", ["kv", "iswa", "hybrid", "hybrid iswa", "twin"])
@pytest.mark.parametrize("unified", [True, False])
def test_one_sequence_goes_between_shared_cells_and_streams_as_it_is(kind: str, unified: bool) -> None:
    with make(kind, unified) as source, make(kind, not unified) as target, make(kind, unified) as back:
        fill(source)
        decode(target, 2, 5)
        scribble(target, 4)
        blob = saved(source, 1)
        assert not load(target, blob, 1)
        target.check()
        assert not load(back, saved(target, 1), 1, convert=True)
        assert saved(back, 1) == blob


BOUNDS = {"f32": 1e-6, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.02, "q5_1": 0.1, "q5_0": 0.1, "q4_1": 0.2, "q4_0": 0.25}
"""How far a row may be off by the step of its type, in parts of its largest element, about twice what was met."""


def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return the largest distance in a row of a cell, as a part of its largest element."""
    flat = [(a.reshape(len(a), -1), b.reshape(len(b), -1)) for a, b in zip(ours, theirs, strict=True)]
    return max(float((np.abs(a - b).max(axis=1) / np.abs(b).max(axis=1)).max()) for a, b in flat)


@pytest.mark.parametrize("have", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("want", list(BOUNDS))
def test_another_type_says_how_much_was_lost(have: str, want: str) -> None:
    """Quantised keys and values are rotated, others not: what comes out are the same numbers all the same."""
    if have == want:
        return
    with filled(type_k=have, type_v=have) as source, cache_of(type_k=want, type_v=want) as target:
        blob = saved(source, 0)
        with pytest.raises(StateError):
            load(target, blob, 0)
        done = load(target, blob, 0, convert=True)
        assert done.what == (f"K {have} → {want}", f"V {have} → {want}")
        ours, theirs = rows(target, 0), rows(source, 0)
        for reported, which in ((done.error_k, slice(0, None, 2)), (done.error_v, slice(1, None, 2))):
            measured = worst(ours[which], theirs[which])
            assert measured <= BOUNDS[want]
            assert reported == pytest.approx(measured, rel=0.02, abs=1e-6)


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("value", "stored", "expected"),
    [(3e38, NAN, INF), (1e6, INF, INF), (INF, NAN, INF), (NAN, 1, INF), (INF, -INF, INF), (4, 3, 0.25)]
    + [(same, same, 0) for same in (NAN, INF, -INF, 0)],
)
def test_a_row_that_lost_a_number(value: float, stored: float, expected: float) -> None:
    values, found = np.ones((2, 2, 4), np.float32)
    values[1, 2], found[1, 2] = value, stored
    assert lost(values, found) == expected


@pytest.mark.parametrize("want", ["f16", "q8_0", "q4_0", "iq4_nl"])
def test_numbers_that_a_type_cannot_hold_were_called_lossless(want: str) -> None:
    with filled(type_k="f32", type_v="f32") as source, cache_of(type_k=want, type_v=want) as target:
        blob = bytearray(saved(source, 0))
        blob[-4:] = np.float32(3e38).tobytes()  # the last of V; rotated, it spreads, and is as much too large
        done = load(target, bytes(blob), 0, convert=True)
        assert done.error_k < 0.3
        assert done.error_v == INF
        assert not done.is_lossless


def test_another_type_and_another_order_at_once() -> None:
    with filled(type_v="f32", v_trans=True) as source, cache_of(type_k="q8_0", type_v="q8_0") as target:
        done = load(target, saved(source, 1), 1, convert=True)
        assert done.what == ("V by channel → by cell", "K f16 → q8_0", "V f32 → q8_0")
        for ours, theirs in zip(rows(target, 1), rows(source, 1), strict=True):
            assert np.abs(ours - theirs).max() <= 0.02 * np.abs(theirs).max()


def test_the_older_dialect_does_not_say_whether_rows_are_rotated() -> None:
    """They are as a cache of their types has them."""
    with filled(type_k="q8_0", type_v="q8_0") as source, cache_of() as target:
        assert (source.store.rot_k, source.store.rot_v) == (64, 64)
        load(target, saved(source, 0, dialect=Dialect.S10), 0, dialect=Dialect.S10, convert=True)
        for ours, theirs in zip(rows(target, 0), rows(source, 0), strict=True):
            assert np.abs(ours - theirs).max() <= 0.01 * np.abs(theirs).max()


def test_what_fits_is_not_converted() -> None:
    with filled() as source, cache_of() as target:
        done = load(target, saved(source), convert=True)
        assert not done
        assert done.is_lossless
        assert saved(target) == saved(source)


def test_other_widths_are_never_converted() -> None:
    with filled() as source, KVCache(MemorySpec((LayerSpec(2, 64, 32),) * 2), n_cells=64, n_seq_max=2) as target:
        with pytest.raises(StateError, match="row"):
            load(target, saved(source, 0), 0, convert=True)
        assert target.pos_max(0) == -1
