"""The first context shift with quantised keys gave rubbish: case A06, ggml-org/llama.cpp#5652, #7230, #9383, #9743."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support.key_scene import KeyScene, fresh, raw_rows, wavy

from pykv.ggml import RopeParams, Tensor
from pykv.memory import KVCache, LayerSpec, MemorySpec

STEPS = {"q8_0": 127, "q5_1": 15, "q5_0": 15, "q4_1": 7, "q4_0": 7, "iq4_nl": 127 / 24, "bf16": 127}
"""Steps from 0 to the largest magnitude of a block; the widest one where they are not even."""

PLAIN = LayerSpec(1, 32, 32, RopeParams(32))
"""Heads too narrow for Hadamard's rotation."""

TURNED = LayerSpec(1, 64, 64, RopeParams(64))
"""Heads that are stored under Hadamard's rotation."""


def make(layer: LayerSpec, dtype: str, n_cells: int = 8, n_layer: int = 1, **more) -> KVCache:
    type_v = dtype if dtype != "bf16" else "f16"
    spec = MemorySpec.uniform(n_layer, layer)
    return KVCache(spec, n_cells=n_cells, type_k=dtype, type_v=type_v, n_threads=1, **more)


def hadamard(n: int) -> NDArray[np.float64]:
    """Return Sylvester's matrix, orthonormal."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


def stored_keys(cache: KVCache, il: int = 0) -> NDArray[np.float32]:
    """Return all rows of K as numbers, (n_cells, n_embd_k), read by another library."""
    return gguf.quants.dequantize(raw_rows(cache)[il][0], gguf.GGMLQuantizationType[cache.settings.type_k.upper()])


def expected_rows(scene: KeyScene, il: int = 0) -> NDArray[np.float64]:
    """Return the rows of sequence 0 as they would be stored now without rounding, in the order of positions."""
    layer = scene.cache.spec.layers[il]
    raw = np.array([scene.raw(token, layer) for _, token in tokens_of(scene.cache)])
    keys = fresh(raw, np.array([p for p, _ in tokens_of(scene.cache)]), layer)
    if layer.n_embd_head_k % 64 == 0 and scene.cache.settings.type_k != "bf16":
        keys = keys @ hadamard(layer.n_embd_head_k)
    return keys.reshape(len(keys), -1)


def tokens_of(cache: KVCache) -> list[tuple[int, int]]:
    """Return (position, token) from the bookkeeping."""
    cells = cache.cells()
    return sorted((int(cells.pos[i]), int(cells.token[i])) for i in range(cells.n) if cells.pos[i] >= 0)


def rows_by_position(cache: KVCache) -> list[int]:
    """Return the occupied cells in the order of positions."""
    pos = cache.cells().pos
    return sorted(np.flatnonzero(pos >= 0).tolist(), key=lambda i: pos[i])


def assert_near(scene: KeyScene, n_roundings: int, il: int = 0) -> None:
    """Compare with the unrounded keys: so many roundings, each by up to one step of its block of 32."""
    expected = expected_rows(scene, il)
    off = stored_keys(scene.cache, il)[rows_by_position(scene.cache)] - expected
    blocks = expected.reshape(len(expected), -1, 32)
    step = np.abs(blocks).max(axis=2, keepdims=True) / STEPS[scene.cache.settings.type_k]
    allowed = np.broadcast_to(n_roundings * step, blocks.shape).reshape(expected.shape)
    if scene.cache.store.rot_k:  # rounding errors of the first kind are spread over the head; their norm stays
        assert (np.linalg.norm(off, axis=1) <= np.linalg.norm(allowed, axis=1)).all()
    else:
        assert (np.abs(off) <= allowed).all()


@pytest.mark.parametrize("layer", [PLAIN, TURNED], ids=["plain", "hadamard"])
@pytest.mark.parametrize("dtype", STEPS)
def test_the_first_shift_of_quantised_keys_gave_rubbish(dtype: str, layer: LayerSpec) -> None:
    with make(layer, dtype) as cache:
        scene = KeyScene(cache, lambda _, layer: wavy(0, layer))
        scene.store(0, range(6))
        assert_near(scene, 1)
        _, v_before = raw_rows(cache)[0]
        cache.seq_rm(0, 0, 2)
        cache.seq_add(0, 2, 6, -2)
        assert tokens_of(cache) == [(0, 2), (1, 3), (2, 4), (3, 5)]
        assert_near(scene, 2)
        assert np.array_equal(raw_rows(cache)[0][1], v_before)
        cache.check()


@pytest.mark.parametrize("layer", [PLAIN, TURNED], ids=["plain", "hadamard"])
@pytest.mark.parametrize("dtype", STEPS)
def test_rows_that_did_not_move_were_rounded_again(dtype: str, layer: LayerSpec) -> None:
    """Those rows hold bytes that no rounding yields, so that rounding them again would show."""
    with make(layer, dtype, n_layer=2) as cache:
        KeyScene(cache, wavy).store(0, range(8))
        for il in range(2):
            scribble(cache.tensors(il)[0], [0, 1, 2, 3, 7])
        before = raw_rows(cache)
        cache.seq_rm(0, 2, 4)
        cache.seq_add(0, 4, 7, -2)
        cache.seq_add(0, 7, 8, 5)
        cache.seq_add(0, 12, 13, -5)
        for (k, v), (k_before, v_before) in zip(raw_rows(cache), before, strict=True):
            changed = np.flatnonzero((k != k_before).any(axis=1)).tolist()
            assert changed == [4, 5, 6]
            assert np.array_equal(v, v_before)


def scribble(tensor: Tensor, rows: list[int]) -> None:
    """Write random bytes over rows."""
    size = tensor.dtype.row_size(tensor.ne[0])
    for row in rows:
        tensor.set(np.random.default_rng(row).integers(0, 256, size, np.uint8), row * size)


@pytest.mark.parametrize("layer", [PLAIN, TURNED], ids=["plain", "hadamard"])
@pytest.mark.parametrize("dtype", STEPS)
def test_ten_shifts_round_ten_times_and_no_more(dtype: str, layer: LayerSpec) -> None:
    with make(layer, dtype, n_cells=16) as cache:
        scene = KeyScene(cache, wavy)
        scene.store(0, range(10, 16))
        for _ in range(10):
            cache.seq_add(0, 0, -1, -1)
            cache.update()
        assert cache.pos_min(0) == 0
        assert_near(scene, 10)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_queued_shifts_round_once(dtype: str) -> None:
    with make(PLAIN, dtype, n_cells=16) as cache, make(PLAIN, dtype, n_cells=16) as twin:
        scene = KeyScene(cache, wavy)
        for one in (scene, KeyScene(twin, wavy)):
            one.store(0, range(10, 16))
        for _ in range(10):
            cache.seq_add(0, 0, -1, -1)
        twin.seq_add(0, 0, -1, -10)
        assert np.array_equal(raw_rows(cache)[0][0], raw_rows(twin)[0][0])
        assert_near(scene, 2)


# the same with other layers and other moves

LAYERS = (
    LayerSpec(2, 64, 64, RopeParams(64, mode="neox", freq_base=1e6)),
    LayerSpec(2, 64, 64, RopeParams(32, freq_scale=0.5)),
    LayerSpec(2, 64, 64),
    LayerSpec(1, 64, 64, RopeParams(64, n_ctx_orig=64, freq_scale=0.25, ext_factor=1.0, attn_factor=1.25)),
)
"""Pairs half a head apart; half the head unturned; no RoPE at all; YaRN with a magnitude."""


@pytest.mark.parametrize("dtype", STEPS)
def test_each_layer_turns_its_keys_in_its_own_way(dtype: str) -> None:
    with KVCache(MemorySpec(LAYERS), n_cells=16, type_k=dtype, n_threads=1) as cache:
        scene = KeyScene(cache, wavy)
        scene.store(0, range(12))
        no_rope = raw_rows(cache)[2][0]
        cache.seq_rm(0, 1, 4)
        cache.seq_add(0, 4, 12, -3)
        cache.update()
        cache.seq_div(0, 4, 9, 2)
        for il in range(len(LAYERS)):
            assert_near(scene, 3, il)
        assert np.array_equal(raw_rows(cache)[2][0], no_rope)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "iq4_nl"])
def test_a_fork_keeps_its_bytes_while_the_original_moves(dtype: str, unified: bool) -> None:
    """Rows are copied as they are, not through floats."""
    kinds = {"n_cells": 16, "n_seq_max": 2, "unified": unified}
    with make(TURNED, dtype, **kinds) as cache, make(TURNED, dtype, **kinds) as twin:
        for one in (cache, twin):
            KeyScene(one, wavy).store(0, range(6))
        original = raw_rows(cache)[0][0][:6]
        cache.seq_cp(0, 1)
        for one in (cache, twin):
            one.seq_rm(0, 0, 1)
            one.seq_add(0, 1, -1, -1)
        assert np.array_equal(cache.k(0, 0), twin.k(0, 0))
        first = 0 if unified else 16
        assert np.array_equal(raw_rows(cache)[0][0][first : first + 6], original)
