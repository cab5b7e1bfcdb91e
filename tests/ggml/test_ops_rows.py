"""Gather and scatter of rows against numpy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from support.cpu_graph import Bench, run
from support.nmse import nmse

from pykv.errors import TensorError
from pykv.ggml import (
    Arena,
    Backend,
    Buffer,
    DType,
    Graph,
    GraphInput,
    Sched,
    Tensor,
    cpu_device,
    from_float,
    ops,
)

RNG = np.random.default_rng(7)

CACHE_NMSE = {
    DType.F32: 0.0,
    DType.F16: 1e-6,
    DType.BF16: 1e-5,
    DType.Q8_0: 1e-4,
    DType.Q5_1: 4e-3,
    DType.Q5_0: 4e-3,
    DType.Q4_1: 1.5e-2,
    DType.Q4_0: 1.5e-2,
    DType.IQ4_NL: 1.5e-2,
}
"""Rounding of normal values to that many bits a block of 32: a quarter for each bit more."""


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def dequantized(raw: np.ndarray, dtype: DType) -> np.ndarray:
    return gguf.dequantize(raw.reshape(-1, dtype.row_size(64)), gguf.GGMLQuantizationType(int(dtype)))


@pytest.mark.parametrize("dtype", CACHE_NMSE, ids=lambda t: t.label)
def test_get_rows(dtype):
    table, index = normal(10, 64), np.array([9, 0, 3, 3], np.int32)
    expect = dequantized(from_float(dtype, table), dtype)[index]
    assert np.array_equal(run(ops.get_rows, (table, dtype), index)[0, 0], expect)


def test_get_rows_of_i32_stay_i32():
    table, index = np.arange(12, dtype=np.int32).reshape(6, 2), np.array([5, 0], np.int32)
    out = run(ops.get_rows, table, index)
    assert out.dtype == np.int32
    assert out[0, 0].tolist() == [[10, 11], [0, 1]]


def test_get_rows_over_dims_2_and_3():
    table, index = normal(2, 3, 5, 8), RNG.integers(0, 5, (2, 3, 4)).astype(np.int32)
    expect = np.take_along_axis(table, index[..., None].astype(np.int64), axis=2)
    assert np.array_equal(run(ops.get_rows, table, index), expect)


@pytest.mark.parametrize("index_type", [np.int64, np.int32])
@pytest.mark.parametrize("dtype", CACHE_NMSE, ids=lambda t: t.label)
def test_set_rows_converts_and_leaves_the_other_rows_alone(dtype, index_type):
    bench = Bench()
    cache = bench.put(np.zeros((8, 64), np.float32), dtype)
    rows, at = normal(3, 64), np.array([6, 1, 4], index_type)
    written = ops.set_rows(bench.nodes, cache, bench.put(rows), bench.put(at))
    with bench.computed(written):
        raw = cache.raw_bytes().reshape(8, -1)
        view = written.raw_bytes().reshape(8, -1)
    assert np.array_equal(raw, view), "the result is a view of the cache"
    untouched = np.setdiff1d(np.arange(8), at)
    before = bench.values[cache].view(np.uint8).reshape(8, -1)
    assert np.array_equal(raw[untouched], before[untouched])
    assert nmse(dequantized(raw[at], dtype), rows) <= CACHE_NMSE[dtype]


def test_set_rows_of_single_elements_scatters_a_transposed_cache():
    bench = Bench()
    cache = bench.put(np.zeros((4, 6), np.float16))  # [6 cells, 4 channels]
    values, cells = normal(2, 4), np.array([5, 2])
    at = (np.arange(4)[None, :] * 6 + cells[:, None]).reshape(-1)
    flat = ops.reshape(bench.nodes, cache, 1, 24)
    ops_rows = bench.put(values.reshape(8, 1))
    out = ops.set_rows(bench.nodes, flat, ops_rows, bench.put(at.astype(np.int64)))
    expect = np.zeros((4, 6), np.float16)
    expect[:, cells] = values.T.astype(np.float16)
    with bench.computed(out):
        assert np.array_equal(cache.numpy()[0, 0], expect)


def test_set_rows_over_streams():
    bench = Bench()
    cache = bench.put(np.zeros((2, 4, 8), np.float32))
    rows, at = normal(2, 3, 8), np.array([[0, 3, 1], [2, 0, 3]], np.int64)
    out = ops.set_rows(bench.nodes, cache, bench.put(rows), bench.put(at))
    expect = np.zeros((2, 4, 8), np.float32)
    np.put_along_axis(expect, at[..., None], rows, axis=1)
    with bench.computed(out):
        assert np.array_equal(cache.numpy()[0], expect)


@pytest.fixture
def arena() -> Arena:
    return Arena(64)


def test_get_rows_refuses(arena):
    table = arena.tensor(DType.F32, (4, 6))
    with pytest.raises(TensorError, match="wants i32"):
        ops.get_rows(arena, table, arena.tensor(DType.I64, (3,)))
    for index in ((3, 2), (3, 1, 2), (3, 1, 1, 2)):
        with pytest.raises(TensorError, match="dims 2 and 3"):
            ops.get_rows(arena, table, arena.tensor(DType.I32, index))
    with pytest.raises(TensorError, match="dense"):
        ops.get_rows(arena, ops.transpose(arena, table), arena.tensor(DType.I32, (1,)))
    for dtype in (DType.I64, DType.F64, DType.I8, DType.Q8_1, DType.Q8_K):
        with pytest.raises(TensorError, match="get_rows: wants"):
            ops.get_rows(arena, arena.tensor(dtype, (256, 2)), arena.tensor(DType.I32, (1,)))


def test_set_rows_refuses(arena):
    cache, rows, at = (arena.tensor(DType.F32, (4, 6)), arena.tensor(DType.F32, (4, 3)), arena.tensor(DType.I64, (3,)))
    for wrong in ((5, 3), (4, 2), (4, 3, 2)):
        with pytest.raises(TensorError, match="shapes"):
            ops.set_rows(arena, cache, arena.tensor(DType.F32, wrong), at)
    for wrong_at in ((4,), (3, 2), (3, 1, 1, 2)):
        with pytest.raises(TensorError, match="shapes"):
            ops.set_rows(arena, cache, rows, arena.tensor(DType.I64, wrong_at))
    with pytest.raises(TensorError, match="wants i64 or i32"):
        ops.set_rows(arena, cache, rows, arena.tensor(DType.F32, (3,)))
    with pytest.raises(TensorError, match="wants f32"):
        ops.set_rows(arena, cache, arena.tensor(DType.F16, (4, 3)), at)
    wide = arena.tensor(DType.F32, (256, 3))
    for dtype in (DType.I8, DType.IQ3_S, DType.Q4_K):
        with pytest.raises(TensorError, match="set_rows: wants"):
            ops.set_rows(arena, arena.tensor(dtype, (256, 6)), wide, at)
    square = arena.tensor(DType.F32, (4, 4))
    with pytest.raises(TensorError, match="layouts"):
        ops.set_rows(arena, ops.transpose(arena, square), square, arena.tensor(DType.I64, (4,)))
    with pytest.raises(TensorError, match="layouts"):
        ops.set_rows(arena, square, ops.transpose(arena, square), arena.tensor(DType.I64, (4,)))


# indices are data: they are looked at before every computation


@pytest.fixture
def sched():
    with Backend(cpu_device(), 1) as backend, Sched([backend], 64) as sched:
        yield sched


def gathering(sched: Sched, kind: DType = DType.F32, n: int = 3) -> tuple[Graph, GraphInput, Tensor]:
    """Return a graph that reads n rows of a table of 5, its index, and what comes out."""
    arena = Arena(16, 16)
    table = GraphInput(arena.tensor(DType.F32, (4, 5)))
    index = GraphInput(arena.tensor(DType.I32, (n,), "index"))
    out = ops.get_rows(arena, ops.cast(arena, table.tensor, kind), index.tensor).as_output()
    graph = Graph(arena)
    graph.expand(out)
    sched.allocate(graph)
    table.bind()
    table.array[0, 0] = np.arange(20).reshape(5, 4)
    index.bind()
    return graph, index, out


@pytest.mark.parametrize("n", [1, 3, 16, 17, 100])
@pytest.mark.parametrize("bad", [5, -1, 2**31 - 1, -(2**31)])
def test_a_row_that_does_not_exist_is_named_and_nothing_runs(sched, bad, n):
    graph, index, out = gathering(sched, n=n)
    index.array[...] = np.arange(n) % 5
    index.array[..., n // 2] = bad
    with pytest.raises(TensorError, match=rf"'index'.*: {bad} names no row; they are 0 to 4"):
        sched.compute(graph)
    with pytest.raises(TensorError, match="names no row"):
        index.tensor.set(np.array([bad], np.int32))
    index.array[..., n // 2] = 4
    sched.compute(graph)
    expect = np.arange(n) % 5
    expect[n // 2] = 4
    assert out.numpy()[0, 0, :, 0].tolist() == (4 * expect).tolist()


def test_an_index_that_was_never_filled_names_row_0(sched):
    for _ in range(3):  # memory that was used before
        graph, _, out = gathering(sched, DType.F16)
        sched.compute(graph)
        assert out.numpy()[0, 0].tolist() == [[0, 1, 2, 3]] * 3


def test_an_index_is_still_there_for_the_next_computation(sched):
    arena = Arena(64, 64)
    table = arena.tensor(DType.F32, (64, 5))
    index = GraphInput(arena.tensor(DType.I32, (64,)))
    x = ops.get_rows(arena, table, index.tensor)
    for _ in range(20):
        x = ops.add(arena, ops.tanh(arena, x), x)
    graph = Graph(arena)
    graph.expand(x.as_output())
    sched.allocate(graph)
    index.bind()
    index.array[...] = 4
    for _ in range(3):
        sched.compute(graph)
        assert (index.array == 4).all()


def test_one_index_over_two_tables_obeys_the_smaller(sched):
    arena = Arena(16, 16)
    index = GraphInput(arena.tensor(DType.I32, (1,), "index"))
    graph = Graph(arena)
    for n_rows in (7, 3, 9):
        graph.expand(ops.get_rows(arena, arena.tensor(DType.F32, (4, n_rows)), index.tensor).as_output())
    sched.allocate(graph)
    index.bind()
    index.array[...] = 3
    with pytest.raises(TensorError, match="3 names no row; they are 0 to 2"):
        sched.compute(graph)
    index.array[...] = 2
    sched.compute(graph)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_rows_to_write_are_checked_too(sched, kind):
    bench = Bench()
    cache = bench.put(np.zeros((4, 8), np.float32))
    out = ops.set_rows(bench.nodes, cache, bench.put(np.ones((2, 8), np.float32)), bench.put(np.array([0, 4], kind)))
    with pytest.raises(TensorError, match="4 names no row; they are 0 to 3"), bench.computed(out):
        pass


def test_an_index_that_is_computed_is_refused(arena):
    index = ops.cont(arena, arena.tensor(DType.I32, (2,)))
    with pytest.raises(TensorError, match="computed"):
        ops.get_rows(arena, arena.tensor(DType.F32, (4, 3)), index)
    with pytest.raises(TensorError, match="computed"):
        ops.set_rows(arena, arena.tensor(DType.F32, (4, 3)), arena.tensor(DType.F32, (4, 2)), index)


def test_an_index_that_no_node_of_the_graph_reads(sched):
    arena = Arena(16, 16)
    x = arena.tensor(DType.F32, (4, 3))
    ops.get_rows(arena, x, arena.tensor(DType.I32, (2,)))
    graph = Graph(arena)
    graph.expand(ops.tanh(arena, x))
    sched.allocate(graph)
    sched.compute(graph)


def test_a_part_of_an_index_is_not_written():
    arena = Arena(4)
    index = arena.tensor(DType.I64, (2,))
    ops.get_rows(Arena(2), arena.tensor(DType.F32, (4, 3)), arena.tensor(DType.I32, (1,)))
    ops.set_rows(Arena(1), arena.tensor(DType.F32, (4, 2)), Arena(1).tensor(DType.F32, (4, 2)), index)
    Buffer.allocate(arena, cpu_device().buffer_type, "test").adopt(index)
    with pytest.raises(TensorError, match="written whole"):
        index.set(np.zeros(1, np.int32))
    index.set(np.ones(1, np.int64), offset=8)
    assert index.numpy().reshape(-1).tolist() == [0, 1]
