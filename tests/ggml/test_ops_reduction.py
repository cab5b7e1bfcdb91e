"""Sums and means of rows against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graph import run

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, ops

REDUCED = {"sum_rows": np.sum, "mean": np.mean}
RNG = np.random.default_rng(22)


@pytest.mark.parametrize("shape", [(1,), (67,), (3, 5), (2, 3, 4, 33)])
@pytest.mark.parametrize("name", REDUCED)
def test_against_numpy(name, shape):
    x = RNG.standard_normal(shape).astype(np.float32)
    expect = REDUCED[name](x.astype(np.float64), axis=-1, keepdims=True)
    assert np.allclose(run(getattr(ops, name), x).reshape(expect.shape), expect, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REDUCED)
def test_a_part_of_each_row(name):
    x = RNG.standard_normal((3, 8)).astype(np.float32)

    def build(c: Arena, a: Tensor) -> Tensor:
        return getattr(ops, name)(c, ops.view(c, a, (4, 3, 1, 1), a.nb[1:], 8))

    expect = REDUCED[name](x[:, 2:6].astype(np.float64), axis=-1, keepdims=True)
    assert np.allclose(run(build, x)[0, 0], expect, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REDUCED)
def test_refusals(name):
    arena = Arena(8)
    for kind in (DType.F16, DType.I32):
        with pytest.raises(TensorError, match=f"{name}: wants f32"):
            getattr(ops, name)(arena, arena.tensor(kind, (4, 3)))
    with pytest.raises(TensorError, match=f"{name}: .*dense"):
        getattr(ops, name)(arena, ops.transpose(arena, arena.tensor(DType.F32, (4, 3))))
