"""Norms over rows against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graph import run

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, ops

RNG = np.random.default_rng(20)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def rms_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def norm(x: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def l2_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), eps)


NORMS = {"rms_norm": rms_norm, "norm": norm, "l2_norm": l2_norm}


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0, 30.0])
@pytest.mark.parametrize("name", NORMS)
def test_against_numpy(name, eps):
    x = 3 + 2 * normal(2, 3, 67)
    out = run(lambda c, a: getattr(ops, name)(c, a, eps), x)[0]
    assert np.allclose(out, NORMS[name](x.astype(np.float64), eps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_a_part_of_each_row(name):
    x = normal(2, 3, 40)

    def build(c: Arena, a: Tensor) -> Tensor:
        return getattr(ops, name)(c, ops.view(c, a, (24, 3, 2, 1), a.nb[1:], 8 * 4), 1e-6)

    expect = NORMS[name](x[..., 8:32].astype(np.float64), 1e-6)
    assert np.allclose(run(build, x)[0], expect, rtol=1e-5, atol=1e-6)


def test_rms_norm_and_weight_in_one_kernel_of_many_rows():
    x, w = normal(5, 4, 32), normal(32)
    out = run(lambda c, a, b: ops.mul(c, ops.rms_norm(c, a, 1e-6), b), x, w)[0]
    assert np.allclose(out, rms_norm(x.astype(np.float64), 1e-6) * w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_refusals(name):
    op, arena = getattr(ops, name), Arena(16)
    for eps in (-1e-9, float("nan"), -float("inf")):
        with pytest.raises(TensorError, match=f"{name}: eps="):
            op(arena, arena.tensor(DType.F32, (4,)), eps)
    with pytest.raises(TensorError, match=f"{name}: wants f32"):
        op(arena, arena.tensor(DType.F16, (4, 3)), 1e-5)
    with pytest.raises(TensorError, match=f"{name}: .*dense"):
        op(arena, ops.transpose(arena, arena.tensor(DType.F32, (4, 3))), 1e-5)
