"""The rotation that quantised K and V are stored under."""

from __future__ import annotations

import numpy as np
import pytest
from support.kv_scene import KVScene, run

from pykv.memory import AttentionPath, KVCache, KVPlan, KVSettings, LayerSpec, MemorySpec
from pykv.memory.hadamard import hadamard, rotation_sizes


def sylvester(n: int) -> np.ndarray:
    """Double the matrix until it is large enough: the construction, not the formula."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


@pytest.mark.parametrize("n", [1, 2, 64, 128, 256])
def test_matrix_is_sylvesters_and_its_own_inverse(n: int) -> None:
    matrix = hadamard(n)
    assert matrix.dtype == np.float32
    np.testing.assert_allclose(matrix, sylvester(n), rtol=1e-6)
    np.testing.assert_allclose(matrix @ matrix, np.eye(n), atol=1e-6)
    assert not matrix.flags.writeable


@pytest.mark.parametrize("n", [0, 3, 96])
def test_matrix_of_no_power_of_two(n: int) -> None:
    with pytest.raises(AssertionError, match="power of two"):
        hadamard(n)


def sizes(*heads: tuple[int, int], type_k: str = "q8_0", type_v: str = "q8_0", **settings) -> tuple[int, int]:
    spec = MemorySpec(tuple(LayerSpec(1, k, v) for k, v in heads))
    return rotation_sizes(spec, KVPlan(spec, KVSettings(8, type_k=type_k, type_v=type_v, **settings)))


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([(64, 64)], (64, 64)),
        ([(128, 128)], (128, 64)),
        ([(192, 128)], (64, 64)),
        ([(256, 256)], (256, 64)),
        ([(320, 320)], (64, 64)),
        ([(576, 512)], (64, 64)),
        ([(96, 64)], (0, 64)),
        ([(64, 96)], (64, 0)),
        ([(32, 32)], (0, 0)),
        ([(64, 64), (64, 128)], (64, 0)),
        ([(128, 64), (64, 64)], (0, 64)),
    ],
)
def test_block_sizes_follow_the_heads(heads: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    assert sizes(*heads) == expected


def test_only_quantised_types_are_rotated() -> None:
    for plain in ("f32", "f16", "bf16"):
        assert sizes((64, 64), type_k=plain) == (0, 64)
        assert sizes((64, 64), type_v=plain) == (64, 0)
    for blocks in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"):
        assert sizes((64, 64), type_k=blocks, type_v=blocks) == (64, 64)


def test_layer_0_decides_even_where_it_is_not_cached() -> None:
    assert sizes((32, 32), (64, 64), layers=frozenset({1})) == (0, 0)
    assert sizes((64, 64), (128, 128), layers=frozenset({1})) == (128, 64)


def test_rotation_reached_into_the_next_head_where_layer_0_alone_had_whole_blocks() -> None:
    assert sizes((64, 64), (96, 96), layers=frozenset({1})) == (0, 0)


STEPS = {"q8_0": 0.6 / 127, "q5_0": 1.01 / 16, "q4_0": 1.01 / 8}
"""Largest error in units of a block's largest value: q8_0 rounds to half a step and its scale to f16; the signed
types have a step more below zero than above, which costs a whole one."""


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("head", [64, 128])
def test_stored_rows_are_rotated_blocks(head: int, dtype: str) -> None:
    spec = MemorySpec((LayerSpec(2, head, head),))
    with KVCache(spec, KVSettings(8, type_k=dtype, type_v=dtype)) as cache:
        scene = KVScene(cache, AttentionPath.FLASH, n_head=2)
        scene.step(run(0, range(3)))
        stored = cache.tensors(0)[0].to_f32()[0, 0, :3]
        given = scene.last_k[0].reshape(3, -1, head).astype(np.float64)
    wanted = (given @ sylvester(head)).reshape(3, -1, 32)
    most = np.abs(wanted).max(axis=2, keepdims=True) * STEPS[dtype]
    assert (np.abs(stored.reshape(wanted.shape) - wanted) <= most).all()
    # and it is a rotation that does something
    assert np.abs(stored.reshape(wanted.shape) - given.reshape(wanted.shape)).max() > 0.5


def test_values_are_rotated_by_64_whatever_the_head() -> None:
    spec = MemorySpec((LayerSpec(1, 128, 128),))
    with KVCache(spec, KVSettings(8, type_v="q8_0")) as cache:
        assert (cache.store.rot_k, cache.store.rot_v) == (0, 64)
        scene = KVScene(cache, AttentionPath.FLASH, n_head=1)
        scene.step(run(0, range(2)))
        v = np.array([row[3] for row in scene.naive[0].rows]).reshape(2, 2, 64)
        stored = cache.tensors(0)[1].to_f32()[0, 0, :2].reshape(v.shape)
    wanted = v @ sylvester(64)
    np.testing.assert_allclose(stored, wanted, atol=np.abs(wanted).max() * STEPS["q8_0"])
