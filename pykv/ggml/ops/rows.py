"""Gather and scatter of rows."""

from __future__ import annotations

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require, require_dtype
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def get_rows(arena: Arena, a: Tensor, index: Tensor) -> Tensor:
    """Return the rows of `a` [n, rows] named by `index` [n_index] i32, as f32 [n, n_index].

    note: indices are data, unseen here; whoever fills `index` keeps them below the number of rows.
    """
    require_dtype("get_rows", index, DType.I32)
    ok = a.ne[2] == index.ne[1] and a.ne[3] == index.ne[2] and index.ne[3] == 1
    require(ok, "get_rows", "dims 2 and 3 differ from the index", a, index)
    return Tensor(lib.ggml_get_rows(arena.take(), a.ptr, index.ptr), arena)


def set_rows(arena: Arena, a: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """Write `rows` [n, n_index] f32 into the rows of `a` [n, n_rows] named by `index` [n_index] i64; mutates `a`.

    Converts to the type of `a`. Returns a view of `a`.
    note: indices are data, unseen here; whoever fills `index` keeps them below the number of rows.
    """
    require_dtype("set_rows", rows, DType.F32)
    require_dtype("set_rows", index, DType.I64, DType.I32)
    ok = (
        a.ne[0] == rows.ne[0]
        and a.ne[2:] == rows.ne[2:]
        and rows.ne[1] == index.ne[0]
        and rows.ne[2] % index.ne[1] == 0
        and rows.ne[3] % index.ne[2] == 0
        and index.ne[3] == 1
        and rows.nb[0] == 4
    )
    require(ok, "set_rows", "shapes do not fit", a, rows, index)
    return Tensor(lib.ggml_set_rows(arena.take(), a.ptr, rows.ptr, index.ptr), arena)
