"""Where decoding may go on, for positions up to the largest: asked of few tokens, answered by few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.iswa_memory import FULL, LAYERS, SWA
from support.kv_scene import run, store_positions
from support.naive_cells import masked_swa
from support.resume_runs import spread

from pykv.cells import SwaType, Window
from pykv.errors import BatchError
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySettings, MemorySpec, StateSpec, iswa, make_memory

LAST, FAR = 2**31 - 2, 2_000_000_000
WINDOW = Window(4, SwaType.STANDARD)
STATE = LayerSpec.recurrent(StateSpec(4, 6))
SPECS = {
    "kv": MemorySpec((FULL,)),
    "window everywhere": MemorySpec((FULL,), WINDOW),
    "chunks everywhere": MemorySpec((FULL,), Window(4, SwaType.CHUNKED)),
    "iswa": MemorySpec(LAYERS, WINDOW),
    "recurrent": MemorySpec((STATE,)),
    "hybrid": MemorySpec((FULL, STATE)),
    "hybrid iswa": MemorySpec((FULL, STATE, SWA), WINDOW),
}


@pytest.fixture(params=SPECS)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a memory that holds positions 0 to 9 of sequence 0."""
    monkeypatch.setattr(iswa, "PAD", 1)
    with make_memory(SPECS[request.param], MemorySettings(KVSettings(64), 8), n_threads=1) as one:
        store_positions(one, run(0, range(10)), 8)
        yield one


def test_the_largest_position_was_more_than_fits_into_memory(memory: Any) -> None:
    answer = memory.resumable(0, LAST)
    assert (answer.largest, answer.reason in ("missing", "window_gone")) == (10, True)
    assert memory.resume_points(0, LAST)[-1].tolist()[1] == 10
    assert memory.resumable(0, 10)


def test_a_sequence_far_out_goes_on(memory: Any) -> None:
    """All but full attention can go on there, and full attention sees nothing that is missing, but positions."""
    memory.seq_add(0, 0, -1, FAR)
    sees_all = any(layer.n_head_kv and not layer.is_swa for layer in memory.spec.layers)
    sees_all &= memory.spec.window.type is SwaType.NONE or any(layer.is_swa for layer in memory.spec.layers)
    answer = memory.resumable(0, FAR + 10)
    assert (bool(answer), answer.largest) == ((False, 0) if sees_all else (True, FAR + 10))
    with memory.snapshot(0) as kept:
        store_positions(memory, run(0, range(FAR + 10, FAR + 14)), 8)
        memory.restore(0, kept)
    assert memory.pos_max(0) == FAR + 9
    memory.check()


def test_a_window_far_out_that_was_overwritten_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iswa, "PAD", 1)
    with make_memory(SPECS["iswa"], MemorySettings(KVSettings(64), 8), n_threads=1) as memory:
        store_positions(memory, run(0, range(30)), 8)
        memory.seq_add(0, 0, -1, FAR)
        memory.seq_rm(0, FAR + 12)
        with pytest.raises(BatchError, match=f"cannot go on at {FAR + 12}.*remove it from 0 on"):
            store_positions(memory, run(0, [FAR + 12]), 8)


WINDOWS = st.builds(Window, st.integers(1, 6), st.sampled_from([*SwaType][1:]))


@given(window=st.none() | WINDOWS, held=st.sets(st.integers(0, 14)), p=st.integers(0, 18))
def test_of_any_positions_that_are_held(window: Window | None, held: set[int], p: int) -> None:
    """session.md 5.1: a token follows another one, and all that it sees is stored."""

    def sees(at: int, key: int) -> bool:
        return window is None or not masked_swa(window.n_swa, window.type.name, key, at)

    points = [q == 0 or (q - 1 in held and all(k in held for k in range(q) if sees(q, k))) for q in range(p + 1)]
    with KVCache(MemorySpec((FULL,), window or Window()), KVSettings(32), n_threads=1) as cache:
        if held:
            store_positions(cache, run(0, range(15)), 15)
            for gone in set(range(15)) - held:
                cache.streams.seq_rm(0, gone, gone + 1)
        assert spread(cache.resume_points(0, p), p) == points
        answer = cache.resumable(0, p)
        assert (bool(answer), answer.largest) == (points[p], max(q for q in range(p + 1) if points[q]))
        if not answer:
            missing = [k for k in range(p) if k not in held and (k == p - 1 or sees(p, k))]
            assert f"needs positions {missing[0]} to {missing[-1]}, which" in answer.detail


@given(window=WINDOWS, held=st.lists(st.integers(0, 14), min_size=1, max_size=12), data=st.data())
def test_of_pictures_only_what_was_overwritten_is_missed(window: Window, held: list[int], data: st.DataObject) -> None:
    """Several tokens stand at one position, and none at others; a window cache may have lost any of them."""
    held.sort()
    lost = data.draw(st.sets(st.integers(0, len(held) - 1)))
    p = data.draw(st.integers(0, held[-1] + 4))
    missed = [held[i] for i in lost]
    points = [
        q <= held[-1] + 1 and all(at >= q or masked_swa(window.n_swa, window.type.name, at, q) for at in missed)
        for q in range(p + 1)
    ]
    spec = MemorySpec(LAYERS, window, n_pos_per_embd=4)
    with make_memory(spec, MemorySettings(KVSettings(32), 16), n_threads=1) as memory:
        store_positions(memory, run(0, held))
        assert memory.swa.cells().pos[: len(held)].tolist() == held
        memory.swa.streams.cells[0].rm(np.array(sorted(lost), np.int64))
        assert spread(memory.resume_points(0, p), p) == points
        answer = memory.resumable(0, p)
        assert (bool(answer), answer.largest) == (points[p], max(q for q in range(p + 1) if points[q]))
