"""Rows and columns reduced to one element each, f32."""

from __future__ import annotations

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require, require_dtype
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def sum_rows(arena: Arena, a: Tensor) -> Tensor:
    """Return the sum of each row: `a` [m, n, n2, n3] → [1, n, n2, n3]."""
    _require_rows("sum_rows", a)
    return arena.node(lib.ggml_sum_rows, (a,))


def mean(arena: Arena, a: Tensor) -> Tensor:
    """Return the mean of each row: `a` [m, n, n2, n3] → [1, n, n2, n3]."""
    _require_rows("mean", a)
    return arena.node(lib.ggml_mean, (a,))


def _require_rows(op: str, a: Tensor) -> None:
    require_dtype(op, a, DType.F32)
    require(a.has_dense_rows, op, "the rows are not dense", a)


def column_max(arena: Arena, a: Tensor) -> Tensor:
    """Return the largest element of each column: `a` [m, n, n2, n3], contiguous → [m, 1, n2, n3], f32."""
    require_dtype("column_max", a, DType.F32)
    require(a.is_contiguous and max(a.ne[:2]) < 2**24, "column_max", "not contiguous, or too large", a)
    # note: ggml reckons the size of the result in floats, which count to 2^24
    return arena.node(lib.ggml_pool_2d, (a,), lib.GGML_OP_POOL_MAX, 1, a.ne[1], 1, a.ne[1], 0.0, 0.0)
