"""Gated activations against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graph import run

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, ops

RNG = np.random.default_rng(19)
ALPHA, LIMIT = 1.702, 2.0


def normal(*shape: int) -> np.ndarray:
    return 2 * RNG.standard_normal(shape).astype(np.float32)


def swish(x: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    return x / (1 + np.exp(-alpha * x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


# as gpt-oss defines it: https://github.com/openai/gpt-oss, `swiglu` in torch/model.py
def clipped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return swish(np.minimum(gate, LIMIT), ALPHA) * (np.clip(up, -LIMIT, LIMIT) + 1)


GATED = {
    "swiglu": (ops.swiglu, lambda gate, up: swish(gate) * up, 1e-5),
    "geglu": (ops.geglu, lambda gate, up: gelu(gate) * up, 4e-3),  # gelu is looked up by the argument as f16
    "swiglu_oai": (lambda c, gate, up: ops.swiglu_oai(c, gate, up, ALPHA, LIMIT), clipped, 1e-5),
}


@pytest.mark.parametrize("name", GATED)
def test_two_tensors(name):
    op, expect, close = GATED[name]
    gate, up = normal(2, 3, 40), normal(2, 3, 40)
    assert np.allclose(run(op, gate, up)[0], expect(gate.astype(np.float64), up), rtol=close, atol=close)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_half_floats(name):
    op, expect, _ = GATED[name]
    gate, up = normal(3, 40).astype(np.float16), normal(3, 40).astype(np.float16)
    wide = expect(gate.astype(np.float64), up.astype(np.float64))
    assert np.allclose(run(op, gate, up)[0, 0], wide, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("name", GATED)
def test_two_halves_of_one_matrix(name):
    op, expect, close = GATED[name]
    both = normal(3, 16)

    def build(c: Arena, x: Tensor) -> Tensor:
        half = (8, 3, 1, 1), x.nb[1:]
        return op(c, ops.view(c, x, *half), ops.view(c, x, *half, offset=8 * 4))

    gate, up = both[:, :8].astype(np.float64), both[:, 8:]
    assert np.allclose(run(build, both)[0, 0], expect(gate, up), rtol=close, atol=close)


@pytest.mark.parametrize("name", GATED)
def test_refusals(name):
    op, arena = GATED[name][0], Arena(16)
    x = arena.tensor(DType.F32, (4, 3))
    for y in (arena.tensor(DType.F32, (4, 2)), arena.tensor(DType.F16, (4, 3))):
        with pytest.raises(TensorError, match=f"{name}: operands differ"):
            op(arena, x, y)
    with pytest.raises(TensorError, match=f"{name}: .*evenly"):
        op(arena, x, ops.transpose(arena, arena.tensor(DType.F32, (3, 4))))
    with pytest.raises(TensorError, match=f"{name}: wants f32"):
        op(arena, arena.tensor(DType.I32, (4,)), arena.tensor(DType.I32, (4,)))


def test_swiglu_oai_has_no_half_floats():
    arena = Arena(2)
    with pytest.raises(TensorError, match="swiglu_oai: wants f32"):
        ops.swiglu_oai(arena, arena.tensor(DType.F16, (4,)), arena.tensor(DType.F16, (4,)), 1.0, 1.0)
