"""Sums and maxima over columns, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graph import run

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, ops

RNG = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 3, 4, 70), (1, 2, 65, 1)])
def test_the_largest_of_each_column(shape) -> None:
    x = normal(*shape)
    assert np.array_equal(run(ops.column_max, x), x.max(axis=2, keepdims=True))


@pytest.mark.parametrize(("n", "repeat"), [(1, 1), (3, 1), (1, 2)])
def test_the_sum_of_outer_products(n: int, repeat: int) -> None:
    a, b = normal(2, 2, 40, 33), normal(2, 2 * repeat, 40, n)
    expect = np.einsum("sgki,sgkj->sgji", np.repeat(a, repeat, axis=1).astype(np.float64), b)
    np.testing.assert_allclose(run(ops.out_prod, a, b), expect, rtol=1e-4, atol=1e-5)


def test_what_they_do_not_take() -> None:
    arena = Arena(16)
    x = arena.tensor(DType.F32, (8, 4))
    with pytest.raises(TensorError, match="column_max: not contiguous"):
        ops.column_max(arena, ops.transpose(arena, x))
    with pytest.raises(TensorError, match="column_max: wants f32"):
        ops.column_max(arena, arena.tensor(DType.F16, (8, 4)))
    with pytest.raises(TensorError, match="out_prod: wants f32"):
        ops.out_prod(arena, x, arena.tensor(DType.F16, (1, 4)))
    with pytest.raises(TensorError, match="out_prod: a product"):
        ops.out_prod(arena, arena.tensor(DType.F32, (2**30, 1)), arena.tensor(DType.F32, (2, 1)))


def test_masses_refuse_weights_that_do_not_fit() -> None:
    arena = Arena(16)
    q, k = arena.tensor(DType.F32, (32, 4, 2, 1)), arena.tensor(DType.F16, (32, 2, 64, 1))
    for of in (
        ops.MassOf(head_weight=arena.tensor(DType.F32, (3,))),
        ops.MassOf(head_weight=arena.tensor(DType.F16, (4,))),
        ops.MassOf(row_weight=arena.tensor(DType.F32, (3,))),
        ops.MassOf(row_weight=arena.tensor(DType.F32, (1, 2))),
    ):
        with pytest.raises(TensorError, match="fused_attn_masses: does not cover weights that are not one f32 a"):
            ops.fused_attn_masses(arena, q, k, k, None, [of], scale=1.0)
