"""How rows move between tensors and bytes: where they lie, or through one buffer of bounded size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.kv_scene import store_positions
from support.state_io import load, saved
from support.state_kinds import KINDS, fill, make

from pykv.ggml import Arena, Buffer, DType, cpu_device, tensor_rows
from pykv.memory import KVCache, LayerSpec, MemorySpec, iswa, state_runs
from pykv.memory.state_cells import CellsOf

FAR = SimpleNamespace(ggml_backend_buffer_is_host=lambda _: False)
"""What finds no memory that the CPU can reach."""


@pytest.fixture(autouse=True)
def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iswa, "PAD", 1)


@pytest.mark.parametrize(("staging", "direct"), [(2**20, 2**14), (512, 64), (1, 1)])
@pytest.mark.parametrize(("name", "unified"), KINDS)
def test_tensors_that_the_cpu_cannot_reach(
    name: str, unified: bool, staging: int, direct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes, whatever the sizes of what is moved at once."""
    with make(name, unified) as near, make(name, unified) as far:
        for one in (near, far):
            fill(one)
        expected = {s: saved(near, s) for s in (-1, 0, 1)}
        far.seq_rm(0)
        near.seq_rm(0)
        monkeypatch.setattr(state_runs, "STAGING_BYTES", staging)
        monkeypatch.setattr(state_runs, "DIRECT_BYTES", direct)
        load(near, expected[0], 0)
        assert saved(near, 0) == expected[0]
        monkeypatch.setattr(tensor_rows, "lib", FAR)
        load(far, expected[0], 0)
        assert {s: saved(far, s) for s in (0, 1)} == {s: expected[s] for s in (0, 1)}
        load(far, expected[-1])
        assert {s: saved(far, s) for s in (0, 1)} == {s: expected[s] for s in (0, 1)}


def memory_of(cache: KVCache) -> list[tuple[int, int]]:
    """Return the first byte and the one behind the last of each tensor."""
    found = []
    for _, *pair in cache.store.own_tensors():
        for tensor in pair:
            items = tensor_rows.host_items(tensor, 1)
            start = items.__array_interface__["data"][0]
            found.append((start, start + items.nbytes))
    return found


def address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])


def test_long_runs_are_handed_over_where_they_lie() -> None:
    spec = MemorySpec((LayerSpec(4, 64, 64), LayerSpec(4, 64, 64)))
    with KVCache(spec, n_cells=512, n_seq_max=2) as cache:
        store_positions(cache, [(0, p) for p in range(400)])
        pieces: list[memoryview] = []
        cache.state_image(0).write_to(pieces.append)
        large = [piece for piece in pieces if piece.nbytes > 2**14]
        assert [piece.nbytes for piece in large] == [400 * 512] * 4
        assert all(any(a <= address(piece) < b for a, b in memory_of(cache)) for piece in large)
        assert all(piece.readonly for piece in large)


@pytest.mark.parametrize("v_trans", [False, True])
def test_scattered_cells_are_gathered_not_called_for_one_by_one(v_trans: bool) -> None:
    spec = MemorySpec((LayerSpec(4, 64, 64),))
    with KVCache(spec, n_cells=1024, n_seq_max=2, v_trans=v_trans) as cache:
        for p in range(400):
            store_positions(cache, [(0, p), (1, p)])
        pieces: list[memoryview] = []
        cache.state_image(0).write_to(pieces.append)
        assert len(pieces) <= 8
        assert max(piece.nbytes for piece in pieces) <= state_runs.STAGING_BYTES


def test_no_piece_is_larger_than_what_is_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_runs, "STAGING_BYTES", 4096)
    spec = MemorySpec((LayerSpec(4, 64, 64),))
    for v_trans in (False, True):
        with KVCache(spec, n_cells=256, n_seq_max=2, v_trans=v_trans) as cache:
            for p in range(100):
                store_positions(cache, [(0, p), (1, p)])
            pieces: list[memoryview] = []
            cache.state_image(0).write_to(pieces.append)
            assert sorted(piece.nbytes for piece in pieces)[:-1][-1] <= 4096, "all but the cells, which are no rows"
            assert len(pieces) <= 2 * 100 * 512 // 4096 + 16


@pytest.fixture
def tensor() -> Any:
    arena = Arena(1)
    one = arena.tensor(DType.F16, (8, 40), "rows")
    buffer = Buffer.allocate(arena, cpu_device().buffer_type, "rows")
    buffer.adopt(one)
    one.set(np.random.default_rng(0).integers(0, 256, one.nbytes, np.uint8))
    yield one
    buffer.close()


@pytest.mark.parametrize("far", [False, True])
def test_rows_in_any_order(tensor: Any, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of several sequences need not lie in the order of their cells."""
    if far:
        monkeypatch.setattr(tensor_rows, "lib", FAR)
    monkeypatch.setattr(state_runs, "DIRECT_BYTES", 48)
    raw = tensor.raw_bytes().reshape(40, 16)
    for rows in ([3], [5, 4, 3], [0, 1, 2, 3, 30, 31, 7, 9, 8], [39, 0], list(range(40)), [38, 39, 0, 1, 2, 3, 4]):
        at, out = np.array(rows), bytearray()
        CellsOf(tensor, at, 8).send(out.extend, by_channel=False)
        assert bytes(out) == raw[at].tobytes()
        fresh = np.random.default_rng(1).integers(0, 256, (len(rows), 16), np.uint8)
        CellsOf(tensor, at, 8).take(fresh.reshape(-1), by_channel=False)
        raw[at] = fresh
        assert np.array_equal(tensor.raw_bytes().reshape(40, 16), raw)
