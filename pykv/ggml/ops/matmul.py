"""Matrix product."""

from __future__ import annotations

from math import prod

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import FLOATS, READABLE, require, require_dtype, require_matrix
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def mul_mat(arena: Arena, a: Tensor, b: Tensor, *, f32_accumulate: bool = False, is_hadamard: bool = False) -> Tensor:
    """Return b times a transposed: `a` [k, m, n2, n3], `b` [k, n, N2, N3] → [m, n, N2, N3] f32.

    Dims 2 and 3 of `a` are repeated to those of `b`. With `is_hadamard` the caller vouches that `a` is an orthonormal
    Hadamard matrix, which lets a backend transform instead of multiply.
    """
    require_dtype("mul_mat", a, *READABLE)
    require_dtype("mul_mat", b, *FLOATS)
    ok = (
        a.ne[0] == b.ne[0]
        and b.ne[2] % a.ne[2] == 0
        and b.ne[3] % a.ne[3] == 0
        and a.has_dense_rows
        and a.nb[0] <= a.nb[1]
        and b.has_dense_rows
    )
    require(ok, "mul_mat", "shapes or layouts do not fit", a, b)
    require_matrix("mul_mat", a, b)
    if is_hadamard:
        square = a.ne[0] == a.ne[1] and a.ne[0].bit_count() == 1 and a.ne[2:] == (1, 1)
        ok = square and a.dtype == b.dtype == DType.F32 and b.is_contiguous
        require(ok, "mul_mat", "no Hadamard matrix, or f32 to transform", a, b)
    DType.F32.check_size((a.ne[1], *b.ne[1:]))
    out = arena.node(lib.ggml_mul_mat, (a, b), matrix=a)
    if f32_accumulate:
        lib.ggml_mul_mat_set_prec(out.raw, lib.GGML_PREC_F32)
    if is_hadamard:
        lib.ggml_mul_mat_set_hint(out.raw, lib.GGML_HINT_SRC0_IS_HADAMARD)
    return out


def out_prod(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over columns of outer products: `a` [m, k, n2, n3], `b` [n, k, N2, N3] → [m, n, N2, N3], f32.

    Dims 2 and 3 of `a` are repeated to those of `b`.
    """
    require_dtype("out_prod", a, DType.F32)
    require_dtype("out_prod", b, DType.F32)
    ok = a.ne[1] == b.ne[1] and b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0 and a.has_dense_rows
    require(ok and a.nb[0] <= a.nb[1], "out_prod", "shapes or layouts do not fit", a, b)
    ne = (a.ne[0], b.ne[0], *b.ne[2:])
    # note: ggml counts the elements in an int when it sets them to zero
    require(prod(ne) <= 2**31 - 1, "out_prod", f"a product {list(ne)} is too large", a, b)
    return arena.node(lib.ggml_out_prod, (a, b))
