"""Views, permutations and copies against numpy; bounds and overflow."""

from __future__ import annotations

from itertools import permutations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_graph import Bench, run

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, from_float, ops

RNG = np.random.default_rng(8)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def arena() -> Arena:
    return Arena(64)


@pytest.mark.parametrize("axes", list(permutations(range(4))))
def test_permute(axes):
    x = normal(2, 3, 4, 5)
    out = run(lambda c, t: ops.cont(c, ops.permute(c, t, *axes)), x)
    # ggml: dim axes[i] of the result is dim i of the operand, counted from the contiguous end
    order = [0] * 4
    for i, axis in enumerate(axes):
        order[3 - axis] = 3 - i
    assert np.array_equal(out, x.transpose(order))


def test_transpose_and_cont():
    x = normal(3, 5)
    assert np.array_equal(run(lambda c, t: ops.cont(c, ops.transpose(c, t)), x)[0, 0], x.T)


@pytest.mark.parametrize("ne", [(24,), (6, 4), (4, 3, 2), (1, 2, 3, 4)])
def test_reshape(ne):
    x = normal(2, 3, 4)
    out = run(lambda c, t: ops.scale(c, ops.reshape(c, t, *ne), 1.0), x)
    assert np.array_equal(out.reshape(-1), x.reshape(-1))
    assert out.shape == tuple(reversed((*ne, 1, 1, 1, 1)[:4]))


def test_view_of_a_part_of_every_dim():
    x = normal(3, 4, 5, 6)

    def build(c: Arena, t: Tensor) -> Tensor:
        offset = 1 * t.nb[3] + 2 * t.nb[2] + 1 * t.nb[1] + 2 * t.nb[0]
        return ops.cont(c, ops.view(c, t, (3, 4, 2, 2), (t.nb[1], t.nb[2], t.nb[3]), offset))

    assert np.array_equal(run(build, x), x[1:3, 2:4, 1:5, 2:5])


def test_view_of_a_view_counts_offsets_from_the_view():
    x = normal(6, 4)

    def build(c: Arena, t: Tensor) -> Tensor:
        lower = ops.view(c, t, (4, 4, 1, 1), (t.nb[1], t.nb[2], t.nb[3]), 2 * t.nb[1])
        return ops.cont(c, ops.view(c, lower, (2, 2, 1, 1), (t.nb[1], t.nb[2], t.nb[3]), t.nb[1] + 4))

    assert np.array_equal(run(build, x)[0, 0], x[3:5, 1:3])


def test_a_stride_of_zero_repeats():
    x = normal(4, 3)
    out = run(lambda c, t: ops.cont(c, ops.view(c, t, (3, 4, 1, 1), (0, 0, 0))), x)
    assert np.array_equal(out[0, 0], np.broadcast_to(x[0], (4, 3)))


def test_rows_of_a_quantised_view():
    x = normal(5, 64)

    def build(c: Arena, t: Tensor) -> Tensor:
        return ops.cast(c, ops.view(c, t, (32, 3, 1, 1), (t.nb[1], t.nb[2], t.nb[3]), t.nb[1] + 34), DType.F32)

    whole = gguf.dequantize(from_float(DType.Q8_0, x).reshape(5, -1), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(run(build, (x, DType.Q8_0))[0, 0], whole[1:4, 32:])


@pytest.mark.parametrize("n", [0, 3])
def test_pad(n):
    x = normal(2, 3, 4)
    assert np.array_equal(run(lambda c, t: ops.pad(c, t, n), x)[0], np.pad(x, ((0, 0), (0, 0), (0, n))))


def test_pad_leaves_a_transposed_tensor_alone(arena):
    with pytest.raises(TensorError, match="pad"):
        ops.pad(arena, ops.transpose(arena, arena.tensor(DType.F32, (4, 3))), 1)


CASTS = [DType.F32, DType.F16, DType.BF16, DType.Q8_0, DType.Q5_1, DType.Q5_0, DType.Q4_1, DType.Q4_0, DType.IQ4_NL]


@pytest.mark.parametrize("target", CASTS, ids=lambda t: t.label)
@pytest.mark.parametrize("source", [DType.F32, DType.F16, DType.BF16], ids=lambda t: t.label)
def test_cast_of_floats_is_the_reference_conversion(source, target):
    x = normal(4, 64).astype(np.float16).astype(np.float32)
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in every float type
    out = run(lambda c, t: ops.cast(c, ops.cast(c, t, target), DType.F32), (x, source))[0, 0]
    expect = gguf.dequantize(from_float(target, x).reshape(4, -1), gguf.GGMLQuantizationType(int(target)))
    step = np.abs(x).reshape(4, 2, 32).max(-1).repeat(32, -1) * (2 / 15)  # kernels may break a tie the other way
    assert np.count_nonzero(out != expect) <= 0.02 * out.size
    assert (np.abs(out - expect) <= step).all()


def test_cast_of_a_permuted_tensor():
    x = normal(2, 3, 4)
    out = run(lambda c, t: ops.cast(c, ops.permute(c, t, 1, 0, 2, 3), DType.F16), x)
    assert np.array_equal(out[0], x.transpose(0, 2, 1).astype(np.float16))


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("dim", range(4))
def test_concat(dim, kind):
    a, b = (normal(*(n + (3 - i == dim) * more for i, n in enumerate((2, 3, 4, 5)))).astype(kind) for more in (0, 2))
    assert np.array_equal(run(lambda c, x, y: ops.concat(c, x, y, dim), a, b), np.concatenate([a, b], 3 - dim))


def test_concat_of_a_transposed_tensor():
    state, x = normal(2, 5, 3), normal(2, 4, 5)
    out = run(lambda c, s, t: ops.concat(c, s, ops.transpose(c, t), 0), state, x)
    assert np.array_equal(out[0], np.concatenate([state, x.swapaxes(1, 2)], -1))


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("ne", [(4,), (8, 3), (4, 6, 5), (4, 3, 1, 2), (12, 9, 2, 2)])
def test_repeat(ne, kind):
    x = normal(1, 1, *((3, 4) if len(ne) > 1 else (1, 4))).astype(kind)
    tiles = [n // own for n, own in zip(((*ne, 1, 1, 1)[:4])[::-1], x.shape, strict=True)]
    assert np.array_equal(run(lambda c, t: ops.repeat(c, t, *ne), x), np.tile(x, tiles))


def copied(build, x: np.ndarray, target: np.ndarray, dtype: DType | None = None) -> np.ndarray:
    """Return the target after ``build(arena, x, target)``, which copies x or some of it."""
    bench = Bench()
    a, b = bench.put(x), bench.put(target, dtype)
    with bench.computed(build(bench.nodes, a, b)):
        return b.to_f32() if dtype and dtype.is_quantized else b.numpy()


def test_cpy_into_some_rows_of_a_larger_tensor():
    x, store = normal(2, 3, 4), normal(6, 12)

    def build(c: Arena, a: Tensor, b: Tensor) -> Tensor:
        return ops.cpy(c, a, ops.view(c, b, (12, 2, 1, 1), b.nb[1:], 3 * b.nb[1]))

    out = copied(build, x, store)[0, 0]
    store[3:5] = x.reshape(2, 12)
    assert np.array_equal(out, store)


def test_cpy_of_the_last_columns_into_snapshots():
    x, store = normal(2, 5, 7), normal(3, 4, 10)  # sequences, channels, time; snapshots, rows

    def build(c: Arena, a: Tensor, b: Tensor) -> Tensor:
        last = ops.view(c, a, (2, 5, 2, 1), a.nb[1:], 5 * 4)
        return ops.cpy(c, last, ops.view(c, b, (10, 2, 1, 1), b.nb[1:], b.nb[2] + b.nb[1]))

    out = copied(build, x, store)[0]
    store[1, 1:3] = x[:, :, 5:].reshape(2, 10)
    assert np.array_equal(out, store)


@pytest.mark.parametrize("source", [np.float32, np.float16])
@pytest.mark.parametrize("target", [np.float32, np.float16])
def test_cpy_between_strided_tensors_converts(source, target):
    x, store = normal(4, 6).astype(source), normal(6, 8).astype(target)

    def build(c: Arena, a: Tensor, b: Tensor) -> Tensor:
        return ops.cpy(c, ops.transpose(c, a), ops.view(c, b, (4, 6, 1, 1), b.nb[1:], 2 * b.nb[0]))

    out = copied(build, x, store)[0, 0]
    store[:, 2:6] = x.T.astype(target)
    assert np.array_equal(out, store)


@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_0], ids=lambda t: t.label)
def test_cpy_into_a_quantised_tensor(dtype):
    x = normal(3, 64)
    out = copied(ops.cpy, x, np.zeros((3, 64), np.float32), dtype)[0, 0]
    expect = gguf.dequantize(from_float(dtype, x).reshape(3, -1), gguf.GGMLQuantizationType(int(dtype)))
    step = np.abs(x).reshape(3, 2, 32).max(-1).repeat(32, -1) * (2 / 15)  # kernels may break a tie the other way
    assert (np.abs(out - expect) <= step).all()
    assert np.count_nonzero(out != expect) <= 0.02 * out.size


def test_cpy_returns_a_view_of_the_target():
    bench = Bench()
    x, target = bench.put(normal(4)), bench.put(np.zeros(4, np.float32))
    out = ops.cpy(bench.nodes, x, target)
    assert out.base is target
    with bench.computed(out):
        assert np.array_equal(out.numpy(), x.numpy())


# refusals


@pytest.mark.parametrize("dim", [-1, 4])
def test_concat_refuses_a_dim_that_does_not_exist(arena, dim):
    with pytest.raises(TensorError, match="concat"):
        ops.concat(arena, arena.tensor(DType.F32, (4,)), arena.tensor(DType.F32, (4,)), dim)


def test_concat_refuses_operands_that_differ(arena):
    x = arena.tensor(DType.F32, (4, 3))
    for y in (arena.tensor(DType.F16, (4, 3)), arena.tensor(DType.F32, (5, 3)), arena.tensor(DType.F32, (4, 3, 2))):
        with pytest.raises(TensorError, match="concat: types differ"):
            ops.concat(arena, x, y, 1)
    for kind in (DType.I64, DType.Q8_0):
        with pytest.raises(TensorError, match="concat: wants"):
            ops.concat(arena, arena.tensor(kind, (32,)), arena.tensor(kind, (32,)), 0)
    huge = arena.tensor(DType.F32, (2**58,))
    with pytest.raises(TensorError, match="takes"):
        ops.concat(arena, huge, arena.tensor(DType.F32, (2**60 - 2**58 + 1,)), 0)


@pytest.mark.parametrize("ne", [(), (2,), (6,), (4, 4), (4, 3, 0), (-4, 3), (4, 3, 1, 1, 1), (2**40, 3 * 2**40)])
def test_repeat_refuses_what_is_no_multiple(arena, ne):
    with pytest.raises(TensorError, match=r"repeat|takes"):
        ops.repeat(arena, arena.tensor(DType.F32, (4, 3)), *ne)


def test_repeat_refuses_types_and_layouts(arena):
    with pytest.raises(TensorError, match="repeat: wants"):
        ops.repeat(arena, arena.tensor(DType.I64, (4,)), 8)
    with pytest.raises(TensorError, match="repeat"):
        ops.repeat(arena, ops.transpose(arena, arena.tensor(DType.F32, (4, 3))), 3, 8)


def test_cpy_refuses(arena):
    x = arena.tensor(DType.F32, (32, 4))
    for target in (arena.tensor(DType.F32, (32, 3)), arena.tensor(DType.Q8_0, (64, 2))):
        with pytest.raises(TensorError, match="cpy: shapes"):
            ops.cpy(arena, x, target)
    rows = arena.tensor(DType.Q8_0, (64, 4))
    for pair in (
        (x, ops.view(arena, rows, (32, 4, 1, 1), rows.nb[1:])),
        (ops.transpose(arena, arena.tensor(DType.F32, (4, 32))), arena.tensor(DType.Q8_0, (32, 4))),
    ):
        with pytest.raises(TensorError, match=r"cpy: .*layouts"):
            ops.cpy(arena, *pair)
    for pair in ((DType.Q8_0, DType.F32), (DType.F32, DType.I32), (DType.I32, DType.F32), (DType.F32, DType.Q4_K)):
        with pytest.raises(TensorError, match="cpy: wants"):
            ops.cpy(arena, *(arena.tensor(kind, (256,)) for kind in pair))


@pytest.mark.parametrize("ne", [(), (5,), (6, 0), (-6,), (-2, -3), (-1, -1, 6), (1, 1, 1, 1, 6), (2**32, 2**32)])
def test_reshape_refuses_what_does_not_hold_the_same_elements(arena, ne):
    with pytest.raises(TensorError, match="reshape"):
        ops.reshape(arena, arena.tensor(DType.F32, (6,)), *ne)


def test_reshape_refuses_strided_and_broken_blocks(arena):
    with pytest.raises(TensorError, match="reshape"):
        ops.reshape(arena, ops.transpose(arena, arena.tensor(DType.F32, (2, 3))), 6)
    with pytest.raises(TensorError, match="reshape"):
        ops.reshape(arena, arena.tensor(DType.Q8_0, (32, 3)), 48, 2)
    assert ops.reshape(arena, arena.tensor(DType.Q8_0, (32, 4)), 64, 2).ne == (64, 2, 1, 1)


VIEWS = {
    "a row too many": ((4, 7, 1, 1), (16, 96, 96), 0),
    "an offset at the end": ((4, 1, 1, 1), (16, 96, 96), 96),
    "an element too far": ((4, 1, 1, 1), (16, 96, 96), 84),
    "a negative offset": ((4, 1, 1, 1), (16, 96, 96), -4),
    "a negative stride": ((4, 2, 1, 1), (-16, 96, 96), 16),
    "no elements": ((4, 0, 1, 1), (16, 96, 96), 0),
    "a negative dim": ((4, -1, 1, 1), (16, 96, 96), 0),
    "an offset within an element": ((4, 1, 1, 1), (16, 96, 96), 2),
    "a stride within an element": ((4, 2, 1, 1), (18, 96, 96), 0),
    "an offset past int64": ((4, 1, 1, 1), (16, 96, 96), 2**64),
    "a stride past int64": ((4, 2, 1, 1), (2**64, 96, 96), 0),
    "a product past int64": ((4, 2**32, 2**32, 1), (0, 0, 0), 0),
    "more elements than there are": ((4, 7, 1, 1), (0, 0, 0), 0),
}


@pytest.mark.parametrize("case", VIEWS)
def test_view_refuses(arena, case):
    x = arena.tensor(DType.F32, (4, 6))
    with pytest.raises(TensorError, match="view"):
        ops.view(arena, x, *VIEWS[case])
    assert arena.n_used == 1


def test_view_refuses_a_part_of_a_block(arena):
    x = arena.tensor(DType.Q8_0, (64, 2))
    with pytest.raises(TensorError, match="block"):
        ops.view(arena, x, (16, 2, 1, 1), (x.nb[1], x.nb[2], x.nb[3]))
    with pytest.raises(TensorError, match="view"):
        ops.view(arena, x, (32, 1, 1, 1), (x.nb[1], x.nb[2], x.nb[3]), 2)


@given(
    ne=st.tuples(*[st.integers(-1, 7)] * 4),
    nb=st.tuples(*[st.integers(-2, 30).map(lambda n: 4 * n)] * 3),
    offset=st.integers(-2, 60).map(lambda n: 4 * n),
)
@settings(max_examples=300, deadline=None)
def test_a_view_that_is_granted_stays_inside(ne, nb, offset):
    arena = Arena(2)
    x = arena.tensor(DType.F32, (5, 4, 2))  # 40 elements
    try:
        out = ops.view(arena, x, ne, nb, offset)
    except TensorError:
        return
    first = offset // 4
    grid = first + sum(
        np.arange(n).reshape([-1 if j == i else 1 for j in range(4)]) * step // 4
        for i, (n, step) in enumerate(zip(ne, (4, *nb), strict=True))
    )
    assert out.ne == ne
    assert grid.min() >= 0
    assert grid.max() < 40


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 0, 1, 2), (0, 1, 2, 4), (-1, 0, 1, 2), (0, 1, 2, 3, 3)])
def test_permute_refuses_what_is_no_permutation(arena, axes):
    with pytest.raises(TensorError, match="permutation"):
        ops.permute(arena, arena.tensor(DType.F32, (2, 3)), *axes)


def test_blocks_are_not_taken_apart(arena):
    x = arena.tensor(DType.Q4_0, (32, 32))
    for refused in (lambda: ops.permute(arena, x, 1, 0, 2, 3), lambda: ops.transpose(arena, x)):
        with pytest.raises(TensorError, match="blocks"):
            refused()
    assert ops.permute(arena, x, 0, 2, 1, 3).ne == (32, 1, 32, 1)


def test_strides_beyond_2_gib_survive_a_permutation(arena):
    x = arena.tensor(DType.F16, (128, 2**20, 64, 2))
    assert x.nb == (2, 256, 2**28, 2**34)
    out = ops.permute(arena, x, 0, 2, 1, 3)
    assert out.nb == (2, 2**28, 256, 2**34)
    assert out.nbytes == x.nbytes
    assert ops.permute(arena, out, 0, 2, 1, 3).nb == x.nb


def test_a_dim_beyond_int_is_not_permuted(arena):
    with pytest.raises(TensorError, match="too large"):
        ops.permute(arena, arena.tensor(DType.F16, (2**31, 1)), 1, 0, 2, 3)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (DType.Q8_0, DType.F16),
        (DType.Q4_0, DType.Q8_0),
        (DType.F32, DType.I8),
        (DType.F32, DType.Q4_K),
        (DType.F32, DType.IQ3_S),
        (DType.I32, DType.F32),
        (DType.F64, DType.F32),
        (DType.Q8_K, DType.F32),
    ],
)
def test_casts_without_a_kernel(arena, source, target):
    with pytest.raises(TensorError, match="cast"):
        ops.cast(arena, arena.tensor(source, (256,)), target)


def test_cast_refuses_rows_that_are_no_whole_blocks(arena):
    with pytest.raises(TensorError, match="whole blocks"):
        ops.cast(arena, arena.tensor(DType.F32, (33,)), DType.Q8_0)
    with pytest.raises(TensorError, match="cannot become"):
        ops.cast(arena, ops.transpose(arena, arena.tensor(DType.F32, (32, 32))), DType.Q8_0)


@pytest.mark.parametrize("n", [-1, 2**31, 2**62])
def test_pad_refuses(arena, n):
    with pytest.raises(TensorError, match="pad"):
        ops.pad(arena, arena.tensor(DType.F32, (4,)), n)
    with pytest.raises(TensorError, match="pad: wants f32"):
        ops.pad(arena, arena.tensor(DType.F16, (4,)), 1)
