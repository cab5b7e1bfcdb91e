"""Elementwise operations against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graph import run

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, ops

RNG = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def arena() -> Arena:
    return Arena(32)


SHAPES = [((4,), (4,)), ((3, 5), (3, 5)), ((3, 5), (5,)), ((3, 5), (1, 1)), ((2, 3, 4, 8), (3, 1, 4)), ((2, 6), (2, 3))]


@pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES)
@pytest.mark.parametrize(("op", "expect"), [(ops.add, np.add), (ops.mul, np.multiply)])
def test_second_operand_repeats_over_the_first(op, expect, a_shape, b_shape):
    a, b = normal(*a_shape), normal(*b_shape)
    tiles = np.divide(a.shape, (1,) * (a.ndim - b.ndim) + b.shape).astype(int)
    out = run(op, a, b)
    assert np.array_equal(out.reshape(a_shape), expect(a, np.tile(b, tiles)))


@pytest.mark.parametrize("op", [ops.add, ops.mul])
def test_half_floats_keep_the_type_of_the_first(op):
    a, b = normal(4, 6).astype(np.float16), normal(6)
    out = run(op, a, b)
    wide = a.astype(np.float32) + b if op is ops.add else a.astype(np.float32) * b
    assert out.dtype == np.float16
    assert np.array_equal(out.reshape(a.shape), wide.astype(np.float16))


def test_bf16_plus_f32_rounds_to_bf16():
    a, b = normal(4, 8), normal(4, 8)
    stored = (a.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in bf16
    out = run(ops.add, (stored, DType.BF16), b).reshape(4, 8)
    assert np.abs(out - (stored + b)).max() <= np.abs(stored + b).max() * 2**-8


def test_scale_and_tanh():
    a = normal(3, 7)
    assert np.array_equal(run(lambda c, x: ops.scale(c, x, -2.5), a)[0, 0], a * np.float32(-2.5))
    assert np.allclose(run(ops.tanh, a)[0, 0], np.tanh(a), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_rms_norm(eps):
    a = normal(2, 3, 64)
    expect = a / np.sqrt((a.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps)
    assert np.allclose(run(lambda c, x: ops.rms_norm(c, x, eps), a)[0], expect, rtol=1e-5, atol=1e-6)


def test_rms_norm_and_weight_in_one_kernel_of_many_rows():
    a, w = normal(5, 4, 32), normal(32)
    out = run(lambda c, x, y: ops.mul(c, ops.rms_norm(c, x, 1e-6), y), a, w)[0]
    assert np.allclose(out, a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "rtol"), [(np.float32, 1e-5), (np.float16, 2e-3)])
def test_swiglu(kind, rtol):
    gate, up = normal(3, 40).astype(kind), normal(3, 40).astype(kind)
    wide = gate.astype(np.float64)
    expect = wide / (1 + np.exp(-wide)) * up.astype(np.float64)
    assert np.allclose(run(ops.swiglu, gate, up)[0, 0], expect, rtol=rtol, atol=rtol)


def test_swiglu_of_two_halves_of_one_matrix():
    both = normal(3, 16)

    def build(c: Arena, x: Tensor) -> Tensor:
        half = (8, 3, 1, 1), (x.nb[1], x.nb[2], x.nb[3])
        return ops.swiglu(c, ops.view(c, x, *half), ops.view(c, x, *half, offset=8 * 4))

    gate, up = both[:, :8].astype(np.float64), both[:, 8:]
    assert np.allclose(run(build, both)[0, 0], gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [ops.add, ops.mul])
def test_operands_that_do_not_fit_are_named(arena, op):
    a = arena.tensor(DType.F32, (4, 3), "left")
    with pytest.raises(TensorError, match=r"tile.*'left'.*\[4, 3, 1, 1\].*'right'.*\[3, 1, 1, 1\]"):
        op(arena, a, arena.tensor(DType.F32, (3,), "right"))
    for small in ((8,), (4, 2), (4, 3, 2), (4, 3, 1, 2)):
        with pytest.raises(TensorError, match="tile"):
            op(arena, a, arena.tensor(DType.F32, small))


@pytest.mark.parametrize("op", [ops.add, ops.mul])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (DType.I32, DType.I32),
        (DType.F32, DType.F16),
        (DType.F16, DType.BF16),
        (DType.Q8_0, DType.F32),
        (DType.F64, DType.F64),
    ],
)
def test_type_pairs_without_a_kernel_are_refused(arena, op, first, second):
    with pytest.raises(TensorError, match="wants"):
        op(arena, arena.tensor(first, (32,)), arena.tensor(second, (32,)))


@pytest.mark.parametrize("op", [ops.tanh, lambda c, x: ops.scale(c, x, 1.0), lambda c, x: ops.rms_norm(c, x, 1e-5)])
def test_one_operand_must_be_f32_with_dense_rows(arena, op):
    with pytest.raises(TensorError, match="wants f32"):
        op(arena, arena.tensor(DType.F16, (4, 3)))
    with pytest.raises(TensorError, match=r"dense|contiguous"):
        op(arena, ops.transpose(arena, arena.tensor(DType.F32, (4, 3))))


def test_scale_refuses_strides_that_ggml_does_though_the_elements_are_contiguous(arena):
    x = ops.permute(arena, arena.tensor(DType.F32, (4, 1, 5, 1)), 0, 2, 1, 3)
    assert x.is_contiguous
    with pytest.raises(TensorError, match="contiguous"):
        ops.scale(arena, x, 2.0)


@pytest.mark.parametrize("eps", [-1e-9, float("nan"), -float("inf")])
def test_an_eps_below_zero_or_nan_is_refused(arena, eps):
    with pytest.raises(TensorError, match="eps="):
        ops.rms_norm(arena, arena.tensor(DType.F32, (4,)), eps)


def test_swiglu_refuses_operands_that_differ(arena):
    x = arena.tensor(DType.F32, (4, 3))
    for y in (arena.tensor(DType.F32, (4, 2)), arena.tensor(DType.F16, (4, 3))):
        with pytest.raises(TensorError, match="differ"):
            ops.swiglu(arena, x, y)
    with pytest.raises(TensorError, match="evenly"):
        ops.swiglu(arena, x, ops.transpose(arena, arena.tensor(DType.F32, (3, 4))))
    with pytest.raises(TensorError, match="wants f32 or f16"):
        ops.swiglu(arena, arena.tensor(DType.I32, (4,)), arena.tensor(DType.I32, (4,)))
