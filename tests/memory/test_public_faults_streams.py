"""Copying to another stream ended the process: case A13, gravitee-io/llamaj.cpp#119, ggml-org/llama.cpp PR #14363."""

from __future__ import annotations

import numpy as np
import pytest
from support.key_scene import KeyScene, raw_rows, snapshot, wavy
from support.kv_scene import run
from support.nmse import nmse
from support.told_text import answer, expected

from pykv.errors import NoSlotError
from pykv.ggml import RopeParams
from pykv.memory import AttentionPath, KVCache, LayerSpec, MemorySpec, UpdateStatus

LAYER = LayerSpec(1, 64, 64)
ROPE = LayerSpec(1, 64, 64, RopeParams(64))


def make(n_cells: int, layer: LayerSpec = ROPE, dtype: str = "f32", **more) -> KVCache:
    return KVCache(MemorySpec((layer,)), n_cells=n_cells, type_k=dtype, type_v=dtype, n_threads=1, **more)


def positions(cache: KVCache, seq_id: int) -> list[int]:
    cells = cache.streams.cells[cache.streams.stream_of(seq_id)]
    return sorted(cells.pos[cells.member(seq_id)].tolist())


def two_streams(dtype: str = "f16", layer: LayerSpec = ROPE) -> tuple[KVCache, KeyScene]:
    """Return 2 streams of 8 cells: tokens 0 to 3 of sequence 0, 10 to 15 of sequence 1."""
    cache = make(8, layer, dtype, n_seq_max=2, unified=False)
    scene = KeyScene(cache, wavy)
    scene.store(0, range(4))
    scene.store(1, range(6), range(10, 16))
    return cache, scene


def test_copying_a_part_to_another_stream_ended_the_process() -> None:
    """It replaces what the other one holds there, row by row."""
    cache, scene = two_streams("f32")
    with cache:
        rows = raw_rows(cache)[0]
        cache.seq_cp(0, 1, 0, 2)
        assert cache.dump(0) == "0:0{0} 1:1{0} 2:2{0} 3:3{0}"
        assert scene.check(0, 1e-5) == [(p, p) for p in range(4)]
        assert scene.check(1, 1e-5) == [(0, 0), (1, 1), (2, 12), (3, 13), (4, 14), (5, 15)]
        for before, after in zip(rows, raw_rows(cache)[0], strict=True):
            assert np.array_equal(after[8:10], before[:2])
            assert np.array_equal(after[10:], before[10:])
            assert np.array_equal(after[:8], before[:8])


def test_copying_a_part_in_one_stream_shares_its_cells() -> None:
    with make(16, ROPE, n_seq_max=2) as cache:
        scene = KeyScene(cache, wavy)
        scene.store(0, range(4))
        cache.seq_cp(0, 1, 0, 2)
        assert cache.dump() == "0:0{0,1} 1:1{0,1} 2:2{0} 3:3{0}"
        assert cache.update() is UpdateStatus.NO_UPDATE


@pytest.mark.parametrize(
    ("p0", "p1", "expected"),
    [
        (2, -1, [(0, 10), (1, 11), (2, 2), (3, 3)]),
        (1, 3, [(0, 10), (1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]),
        (-1, 3, [(0, 0), (1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]),
        (4, 6, [(0, 10), (1, 11), (2, 12), (3, 13)]),
        (2, 2, [(p, 10 + p) for p in range(6)]),
        (0, 100, [(p, p) for p in range(4)]),
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_any_part_copied_to_another_stream(p0: int, p1: int, expected: list, dtype: str) -> None:
    cache, _ = two_streams(dtype)
    with cache:
        k, v = raw_rows(cache)[0]
        cache.seq_cp(0, 1, p0, p1)
        assert positions(cache, 1) == [p for p, _ in expected]
        cells = cache.streams.cells[1]
        new_k, new_v = raw_rows(cache)[0]
        for p, token in expected:
            cell = int(np.flatnonzero((cells.pos == p) & cells.member(1))[0])
            source = token if token < 10 else 8 + token - 10
            assert np.array_equal(new_k[8 + cell], k[source])
            assert np.array_equal(new_v[8 + cell], v[source])
        cache.check()


def test_a_copy_that_finds_no_room_changes_nothing() -> None:
    with make(8, ROPE, n_seq_max=2, unified=False) as cache:
        scene = KeyScene(cache, wavy)
        scene.store(0, range(4))
        scene.store(1, range(10, 16))
        before = snapshot(cache)
        with pytest.raises(NoSlotError, match="3 cells of sequence 0, and stream 1 has room for 2"):
            cache.seq_cp(0, 1, 0, 3)
        assert snapshot(cache) == before
        cache.seq_cp(0, 1, 0, 2)
        assert scene.check(1, 1e-5) == [(0, 0), (1, 1), *((p, p) for p in range(10, 16))]


@pytest.mark.parametrize("path", AttentionPath)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_whole_copy_is_a_twin(dtype: str, path: AttentionPath) -> None:
    v_trans = path is AttentionPath.GROUPED
    with make(8, LAYER, dtype, n_seq_max=2, unified=False, v_trans=v_trans) as cache:
        answer(cache, run(0, range(4)), path)
        answer(cache, run(1, range(6)), path)
        cache.seq_cp(0, 1)
        cache.update()
        assert (positions(cache, 1), cache.streams.heads) == ([0, 1, 2, 3], [4, 4])
        assert np.array_equal(cache.k(0, 1), cache.k(0, 0))
        assert np.array_equal(cache.v(0, 1), cache.v(0, 0))
        first = answer(cache, [(0, 4)], path)
        second = answer(cache, [(1, 4)], path, text=0)
        assert np.array_equal(first, second)
        cache.seq_rm(0)
        assert (positions(cache, 0), positions(cache, 1)) == ([], list(range(5)))
        assert nmse(answer(cache, [(1, 5)], path, text=0), expected(0, [5], 64)) < 1e-5


def test_rows_of_a_whole_copy_are_equal_to_the_byte() -> None:
    cache, scene = two_streams("q8_0")
    with cache:
        cache.seq_cp(0, 1, -1, -1)
        for rows in raw_rows(cache)[0]:
            assert np.array_equal(rows[8:12], rows[:4])
        assert cache.cells(1).n_used == 4
        cache.seq_rm(0)
        assert scene.held(1) == [(p, p) for p in range(4)]


def test_a_copy_queued_before_its_source_changed_got_the_new_rows() -> None:
    """The source is removed, and its cells are filled again, before anything is read."""
    cache, scene = two_streams("f32")
    with cache:
        cache.seq_cp(0, 1)
        cache.seq_rm(0)
        scene.store(0, range(5), range(20, 25))
        assert scene.check(0, 1e-5) == [(p, 20 + p) for p in range(5)]
        assert scene.check(1, 1e-5) == [(p, p) for p in range(4)]


def test_sequences_exchanged_through_a_third() -> None:
    with make(8, ROPE, n_seq_max=3, unified=False) as cache:
        scene = KeyScene(cache, wavy)
        scene.store(0, range(4))
        scene.store(1, range(6), range(10, 16))
        for src, dst in ((0, 2), (1, 0), (2, 1)):
            cache.seq_cp(src, dst)
        cache.seq_rm(2)
        assert scene.check(0, 1e-5) == [(p, 10 + p) for p in range(6)]
        assert scene.check(1, 1e-5) == [(p, p) for p in range(4)]
