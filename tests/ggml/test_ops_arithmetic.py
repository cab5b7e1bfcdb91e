"""Elementwise arithmetic against numpy."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from support.cpu_graph import Bench, run

from pykv.errors import TensorError
from pykv.ggml import Arena, Buffer, DType, Tensor, cpu_device, ops

RNG = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def arena() -> Arena:
    return Arena(32)


SHAPES = [((4,), (4,)), ((3, 5), (3, 5)), ((3, 5), (5,)), ((3, 5), (1, 1)), ((2, 3, 4, 8), (3, 1, 4)), ((2, 6), (2, 3))]
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES)
@pytest.mark.parametrize("name", BINARY)
def test_second_operand_repeats_over_the_first(name, a_shape, b_shape):
    a, b = normal(*a_shape), normal(*b_shape)
    tiles = np.divide(a.shape, (1,) * (a.ndim - b.ndim) + b.shape).astype(int)
    out = run(getattr(ops, name), a, b)
    assert np.array_equal(out.reshape(a_shape), BINARY[name](a, np.tile(b, tiles)))


@pytest.mark.parametrize("name", BINARY)
def test_second_operand_may_be_transposed(name):
    a, b = normal(3, 5), normal(5, 3)
    out = run(lambda c, x, y: getattr(ops, name)(c, x, ops.transpose(c, y)), a, b)
    assert np.array_equal(out[0, 0], BINARY[name](a, b.T))


@pytest.mark.parametrize("name", BINARY)
def test_half_floats_keep_the_type_of_the_first(name):
    a, b = normal(4, 6).astype(np.float16), normal(6)
    out = run(getattr(ops, name), a, b)
    wide = BINARY[name](a.astype(np.float32), b)
    assert out.dtype == np.float16
    assert np.array_equal(out.reshape(a.shape), wide.astype(np.float16))


def test_bf16_plus_f32_rounds_to_bf16():
    a, b = normal(4, 8), normal(4, 8)
    stored = (a.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in bf16
    out = run(ops.add, (stored, DType.BF16), b).reshape(4, 8)
    assert np.abs(out - (stored + b)).max() <= np.abs(stored + b).max() * 2**-8


@pytest.mark.parametrize("bias", [0.0, 1.0, -0.25])
def test_scale(bias):
    a = normal(3, 7)
    expect = a.astype(np.float64) * -2.5 + bias
    assert np.allclose(run(lambda c, x: ops.scale(c, x, -2.5, bias), a)[0, 0], expect, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("value", [-np.inf, 0.0, 1.5])
def test_fill(value, kind):
    out = run(lambda c, x: ops.fill(c, x, value), normal(2, 3).astype(kind))
    assert out.dtype == kind
    assert (out == value).all()


def changed(build, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what an operation that mutates makes of its operand, and the view that it returns."""
    bench = Bench()
    operand = bench.put(array)
    view = build(bench.nodes, operand)
    with bench.computed(view):
        return operand.numpy().reshape(array.shape), view.raw_bytes().view(array.dtype)


def row(c: Arena, x: Tensor, i: int) -> Tensor:
    return ops.view(c, x, (x.ne[0], 1, 1, 1), (x.nb[1],) * 3, i * x.nb[1])


def test_one_row_is_scaled_in_place():
    x = normal(4, 6)
    out, view = changed(lambda c, t: ops.scale_inplace(c, row(c, t, 2), -0.5), x)
    x[2] *= np.float32(-0.5)
    assert np.array_equal(out, x)
    assert np.array_equal(view, x[2])


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_one_row_is_filled_in_place_even_if_it_held_nan(kind):
    x = normal(4, 6).astype(kind)
    x[2, 1] = np.nan
    out, view = changed(lambda c, t: ops.fill_inplace(c, row(c, t, 2), 0.0), x)
    x[2] = 0
    assert np.array_equal(out, x)
    assert not view.any()


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize(("low", "high"), [(-0.5, 1.0), (0.25, np.inf), (-np.inf, 0.0), (0.0, 0.0)])
def test_clamp(low, high, kind):
    x = normal(3, 4, 5).astype(kind)
    out, view = changed(lambda c, t: ops.clamp(c, t, low, high), x)
    assert np.array_equal(out, np.clip(x, low, high))
    assert np.array_equal(view, np.clip(x, low, high).reshape(-1))


def test_clamp_of_a_part_of_each_row():
    x = normal(3, 8)
    out, _ = changed(lambda c, t: ops.clamp(c, ops.view(c, t, (4, 3, 1, 1), t.nb[1:], 8), -0.1, 0.1), x)
    x[:, 2:6] = np.clip(x[:, 2:6], np.float32(-0.1), np.float32(0.1))
    assert np.array_equal(out, x)


# refusals


@pytest.mark.parametrize("name", BINARY)
def test_operands_that_do_not_fit_are_named(arena, name):
    op = getattr(ops, name)
    a = arena.tensor(DType.F32, (4, 3), "left")
    with pytest.raises(TensorError, match=r"tile.*'left'.*\[4, 3, 1, 1\].*'right'.*\[3, 1, 1, 1\]"):
        op(arena, a, arena.tensor(DType.F32, (3,), "right"))
    for small in ((8,), (4, 2), (4, 3, 2), (4, 3, 1, 2)):
        with pytest.raises(TensorError, match="tile"):
            op(arena, a, arena.tensor(DType.F32, small))
    with pytest.raises(TensorError, match="dense"):
        op(arena, ops.transpose(arena, arena.tensor(DType.F32, (4, 4))), arena.tensor(DType.F32, (4, 4)))


@pytest.mark.parametrize("name", BINARY)
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
def test_type_pairs_without_a_kernel_are_refused(arena, name, first, second):
    with pytest.raises(TensorError, match="wants"):
        getattr(ops, name)(arena, arena.tensor(first, (32,)), arena.tensor(second, (32,)))


WHOLE = {
    "scale": lambda c, x: ops.scale(c, x, 1.0),
    "scale_inplace": lambda c, x: ops.scale_inplace(c, x, 1.0),
    "fill": lambda c, x: ops.fill(c, x, 1.0),
    "fill_inplace": lambda c, x: ops.fill_inplace(c, x, 1.0),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_are_wanted(arena, name):
    with pytest.raises(TensorError, match=f"{name}: wants f32"):
        WHOLE[name](arena, arena.tensor(DType.BF16, (4, 3)))
    with pytest.raises(TensorError, match=f"{name}: .*contiguous"):
        WHOLE[name](arena, ops.transpose(arena, arena.tensor(DType.F32, (4, 3))))
    # ggml refuses these strides too, though the elements are contiguous
    x = ops.permute(arena, arena.tensor(DType.F32, (4, 1, 5, 1)), 0, 2, 1, 3)
    assert x.is_contiguous
    with pytest.raises(TensorError, match="contiguous"):
        WHOLE[name](arena, x)


def test_scale_has_no_half_floats(arena):
    for op in ("scale", "scale_inplace"):
        with pytest.raises(TensorError, match=f"{op}: wants f32"):
            WHOLE[op](arena, arena.tensor(DType.F16, (4, 3)))


def test_clamp_refuses(arena):
    x = arena.tensor(DType.F32, (4, 3))
    for low, high in ((1.0, 0.0), (float("nan"), 1.0), (0.0, float("nan"))):
        with pytest.raises(TensorError, match="clamp: low="):
            ops.clamp(arena, x, low, high)
    with pytest.raises(TensorError, match="clamp: wants f32 or f16"):
        ops.clamp(arena, arena.tensor(DType.BF16, (4, 3)), 0.0, 1.0)
    with pytest.raises(TensorError, match="evenly"):
        ops.clamp(arena, ops.transpose(arena, x), 0.0, 1.0)


@pytest.mark.parametrize("name", ["scale_inplace", "fill_inplace", "clamp", "cpy"])
def test_read_only_memory_is_not_changed(name, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    op = (WHOLE | {"clamp": lambda c, x: ops.clamp(c, x, 0, 1), "cpy": lambda c, x: ops.cpy(c, x, x)})[name]
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    home = Arena(2)
    x = home.tensor(DType.F32, (4,))
    with Buffer.wrap(home, cpu_device(), mapped, 4096) as buffer:
        buffer.place(x, 0)
        with pytest.raises(TensorError, match=f"{name}: the memory is read-only"):
            op(Arena(4), x)
