"""Gather and scatter of rows against numpy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from support.cpu_graph import Bench, run
from support.nmse import nmse

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, from_float, ops

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
