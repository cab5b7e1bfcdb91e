"""Matrix products against numpy, over every type that weights and caches come in."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from support.cpu_graph import run
from support.nmse import nmse

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, ops

RNG = np.random.default_rng(6)

WEIGHT_TYPES = [
    *(DType.F16, DType.BF16, DType.Q8_0, DType.Q5_1, DType.Q5_0, DType.Q4_1, DType.Q4_0),
    *(DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K, DType.IQ4_NL, DType.IQ4_XS, DType.MXFP4),
]

ACTIVATION_NMSE = 2e-4
"""Activations are rounded to 8 bits a block of 32 or 256: steps of 1/127 of its largest, of about three deviations,
so an NMSE of (3 / 127)² / 12 = 5e-5; with room for blocks whose largest is larger."""


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def stored(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Return what is left of values in a type, by gguf's own reader of blocks."""
    from pykv.ggml import from_float

    raw = from_float(dtype, values).reshape(*values.shape[:-1], -1)
    return gguf.dequantize(raw, gguf.GGMLQuantizationType(int(dtype)))


def test_f32():
    a, b = normal(7, 40), normal(5, 40)
    assert np.allclose(run(ops.mul_mat, a, b)[0, 0], b @ a.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=lambda t: t.label)
@pytest.mark.parametrize("n", [1, 4])
def test_stored_weights(dtype, n):
    a, b = normal(48, 256), normal(n, 256)
    out = run(ops.mul_mat, (a, dtype), b)[0, 0]
    assert nmse(out, b.astype(np.float64) @ stored(a, dtype).T.astype(np.float64)) < ACTIVATION_NMSE


def test_f16_times_f16():
    a, b = normal(6, 64).astype(np.float16), normal(3, 64).astype(np.float16)
    out = run(ops.mul_mat, a, b)[0, 0]
    assert nmse(out, b.astype(np.float64) @ a.T.astype(np.float64)) < 1e-6


def test_dims_2_and_3_of_the_first_are_repeated():
    a, b = normal(1, 2, 5, 16), normal(3, 6, 4, 16)
    wide = np.repeat(np.broadcast_to(a, (3, 2, 5, 16)), 3, axis=1)  # heads 0,0,0,1,1,1
    assert np.allclose(run(ops.mul_mat, a, b), b @ wide.swapaxes(-1, -2), rtol=1e-4, atol=1e-5)


def test_a_permuted_cache_view_as_the_first():
    k, q = normal(9, 2, 16), normal(4, 3, 16)  # [16, 2 heads, 9 cells], [16, 3 rows, 4 heads]

    def build(c: Arena, k: Tensor, q: Tensor) -> Tensor:
        return ops.mul_mat(c, ops.permute(c, k, 0, 2, 1, 3), q, f32_accumulate=True)

    expect = q @ np.repeat(k.transpose(1, 2, 0), 2, axis=0)
    assert np.allclose(run(build, k, q)[0], expect, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_sums_in_f32_are_what_the_cpu_makes_anyway(kind: type) -> None:
    """So that asking for them, for other devices' sake, leaves rows comparable with llama.cpp's to the bit."""
    a, b = normal(64, 4096).astype(kind), normal(7, 4096)
    asked = run(lambda c, x, y: ops.mul_mat(c, x, y, f32_accumulate=True), a, b)
    assert np.array_equal(asked, run(ops.mul_mat, a, b))


@pytest.fixture
def arena() -> Arena:
    return Arena(32)


@pytest.mark.parametrize(
    ("a", "b"),
    [((4, 3), (5, 3)), ((4, 3, 2), (4, 3, 3)), ((4, 3, 1, 2), (4, 3, 1, 3)), ((4, 3, 4), (4, 3, 2))],
)
def test_shapes_that_do_not_fit(arena, a, b):
    with pytest.raises(TensorError, match="mul_mat: shapes"):
        ops.mul_mat(arena, arena.tensor(DType.F32, a), arena.tensor(DType.F32, b))


def test_layouts_that_do_not_fit(arena):
    x, y = arena.tensor(DType.F32, (4, 4)), arena.tensor(DType.F32, (4, 4))
    for pair in ((ops.transpose(arena, x), y), (x, ops.transpose(arena, y))):
        with pytest.raises(TensorError, match="layouts"):
            ops.mul_mat(arena, *pair)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (DType.I32, DType.F32),
        (DType.F64, DType.F32),
        (DType.Q8_1, DType.F32),
        (DType.Q8_K, DType.F32),
        (DType.F32, DType.I32),
        (DType.F32, DType.Q8_0),
    ],
)
def test_types_without_a_kernel(arena, a, b):
    with pytest.raises(TensorError, match="mul_mat: wants"):
        ops.mul_mat(arena, arena.tensor(a, (256,)), arena.tensor(b, (256,)))


def test_a_product_too_large_to_count(arena):
    x = arena.tensor(DType.F32, (1, 2**40))
    with pytest.raises(TensorError, match="bytes"):
        ops.mul_mat(arena, x, x)
    assert arena.n_used == 1
