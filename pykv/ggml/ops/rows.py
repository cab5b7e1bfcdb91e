"""Gather and scatter of rows."""

from __future__ import annotations

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import READABLE, STORABLE, require, require_dtype, require_index, require_writable
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def get_rows(arena: Arena, a: Tensor, index: Tensor) -> Tensor:
    """Return the rows of `a` [n, rows, n2, n3] named by `index` [n_index, n2, n3] i32, as f32 [n, n_index, n2, n3].

    Rows of i32 stay i32. A computation is refused while `index` names a row that `a` lacks. An index that is computed
    must be of `argsort_top_k`.
    """
    require_dtype("get_rows", index, DType.I32)
    require_dtype("get_rows", a, *READABLE, DType.I32)
    ok = a.ne[2] == index.ne[1] and a.ne[3] == index.ne[2] and index.ne[3] == 1
    require(ok, "get_rows", "dims 2 and 3 differ from the index", a, index)
    require(a.has_dense_rows, "get_rows", "the rows are not dense", a)
    DType.F32.check_size((a.ne[0], *index.ne[:3]))
    require_index("get_rows", index, a.ne[1])
    out = arena.node(lib.ggml_get_rows, (a, index))
    arena.note_index(index, a.ne[1])
    return out


def set_rows(arena: Arena, a: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """Write `rows` [n, n_index] f32 into the rows of `a` [n, n_rows] named by `index` [n_index] i64; mutates `a`.

    Converts to the type of `a`. Returns a view of `a`.
    A computation is refused while `index` names a row that `a` lacks. An index that is computed must be of
    `argsort_top_k`.
    """
    require_dtype("set_rows", a, *STORABLE)
    require_dtype("set_rows", rows, DType.F32)
    require_dtype("set_rows", index, DType.I64, DType.I32)
    ok = (
        a.ne[0] == rows.ne[0]
        and a.ne[2:] == rows.ne[2:]
        and rows.ne[1] == index.ne[0]
        and rows.ne[2] % index.ne[1] == 0
        and rows.ne[3] % index.ne[2] == 0
        and index.ne[3] == 1
        and a.has_dense_rows
        and rows.has_dense_rows
    )
    require(ok, "set_rows", "shapes or layouts do not fit", a, rows, index)
    require_writable("set_rows", a)
    require_index("set_rows", index, a.ne[1])
    out = arena.node(lib.ggml_set_rows, (a, rows, index), view_of=a)
    arena.note_index(index, a.ne[1])
    return out
