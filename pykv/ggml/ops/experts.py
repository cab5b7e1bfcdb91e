"""Choosing experts for each token, and products with the matrices of those that were chosen."""

from __future__ import annotations

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import READABLE, is_evenly_spaced, require, require_dtype, require_index, require_matrix
from pykv.ggml.ops.shape import view
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def argsort_top_k(arena: Arena, a: Tensor, k: int) -> Tensor:
    """Return where the `k` largest elements of each row are, the largest first.

    `a` [m, n, n2, n3] f32 → [k, n, n2, n3] i32.

    Which of two equal elements comes first is open. Two nodes: a sorted whole and a view of its front.
    """
    require_dtype("argsort_top_k", a, DType.F32)
    require(1 <= k <= a.ne[0] < 2**31, "argsort_top_k", f"k={k} must be 1 to the length of a row", a)
    require(is_evenly_spaced(a), "argsort_top_k", "the rows are not evenly spaced", a)
    order = arena.node(lib.ggml_argsort, (a,), lib.GGML_SORT_ORDER_DESC)
    order.values_below = a.ne[0]
    return view(arena, order, (k, *order.ne[1:]), order.nb[1:])


def mul_mat_id(arena: Arena, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """Return each column of b times the transposed matrix that `index` names for it.

    `a` [k, m, n_expert], `b` [k, n_used, n_tokens] f32, or fewer in dim 1, which then take turns; `index`
    [n_used, n_tokens] i32 → [m, n_used, n_tokens] f32.
    """
    require_dtype("mul_mat_id", a, *READABLE)
    require_dtype("mul_mat_id", b, DType.F32)
    require_dtype("mul_mat_id", index, DType.I32)
    ok = (
        a.ne[0] == b.ne[0]
        and a.ne[3] == b.ne[3] == index.ne[2] == index.ne[3] == 1
        and index.ne[1] == b.ne[2]
        and index.ne[0] % b.ne[1] == 0
        and a.has_dense_rows
        and a.nb[0] <= a.nb[1]
        and b.has_dense_rows
    )
    require(ok, "mul_mat_id", "shapes or layouts do not fit", a, b, index)
    require_matrix("mul_mat_id", a, b)
    require_index("mul_mat_id", index, a.ne[2])
    DType.F32.check_size((a.ne[1], index.ne[0], b.ne[2]))
    out = arena.node(lib.ggml_mul_mat_id, (a, b, index), matrix=a)
    arena.note_index(index, a.ne[2])
    return out


def add_id(arena: Arena, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """Return a plus the rows of b that `index` names, all f32.

    `a` [n, n_used, n_tokens], `b` [n, n_expert], `index` [n_used, n_tokens] i32.
    """
    require_dtype("add_id", a, DType.F32)
    require_dtype("add_id", b, DType.F32)
    require_dtype("add_id", index, DType.I32)
    ok = (
        a.ne[0] == b.ne[0]
        and a.ne[1:] == (*index.ne[:2], 1)
        and b.ne[2:] == index.ne[2:] == (1, 1)
        and a.has_dense_rows
        and b.has_dense_rows
    )
    require(ok, "add_id", "shapes or layouts do not fit", a, b, index)
    require_index("add_id", index, b.ne[1])
    out = arena.node(lib.ggml_add_id, (a, b, index))
    arena.note_index(index, b.ne[1])
    return out
