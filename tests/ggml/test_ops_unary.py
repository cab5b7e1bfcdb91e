"""Functions of each element against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graph import run

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, ops

RNG = np.random.default_rng(18)
EDGES = [0.0, -0.0, 1e-30, 1e-6, 0.5, 1, 3, 9.5, 20, 80]


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "neg": np.negative,
    "sqr": np.square,
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.logaddexp(0, x),
}
# gelu is looked up in a table by the argument as f16: its error is that of rounding, twice
CLOSE = {"gelu": {"rtol": 2e-3, "atol": 1e-3}}


def build(name: str, arena: Arena, a: Tensor) -> Tensor:
    return getattr(ops, name)(arena, a)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_numpy(name):
    x = np.concatenate([EDGES, [-x for x in EDGES], 3 * RNG.standard_normal(76)]).astype(np.float32).reshape(2, 3, 16)
    x = np.abs(x) if name == "sqrt" else x
    expect = FUNCTIONS[name](x.astype(np.float64))
    out = run(lambda c, a: build(name, c, a), x)[0]
    assert np.allclose(out, expect, **CLOSE.get(name, {"rtol": 3e-6, "atol": 1e-6}))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_may_have_gaps(name):
    x = np.abs(RNG.standard_normal((2, 3, 8))).astype(np.float32)

    def of_a_part(c: Arena, a: Tensor) -> Tensor:
        return build(name, c, ops.view(c, a, (5, 3, 2, 1), a.nb[1:], 8))

    expect = FUNCTIONS[name](x[..., 2:7].astype(np.float64))
    assert np.allclose(run(of_a_part, x)[0], expect, **CLOSE.get(name, {"rtol": 3e-6, "atol": 1e-6}))


def test_sqrt_below_zero_is_nan():
    assert np.isnan(run(ops.sqrt, np.array([-1], np.float32))).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_refusals(name):
    arena = Arena(8)
    for kind in (DType.F16, DType.I32):
        with pytest.raises(TensorError, match=f"{name}: wants f32"):
            build(name, arena, arena.tensor(kind, (4, 3)))
    with pytest.raises(TensorError, match=f"{name}: .*dense"):
        build(name, arena, ops.transpose(arena, arena.tensor(DType.F32, (4, 3))))
