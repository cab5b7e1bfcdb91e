"""Matrix product."""

from __future__ import annotations

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def mul_mat(arena: Arena, a: Tensor, b: Tensor, *, f32_accumulate: bool = False) -> Tensor:
    """Return b times a transposed: `a` [k, m, n2, n3], `b` [k, n, N2, N3] → [m, n, N2, N3] f32.

    Dims 2 and 3 of `a` are repeated to those of `b`.
    """
    ok = (
        a.ne[0] == b.ne[0]
        and b.ne[2] % a.ne[2] == 0
        and b.ne[3] % a.ne[3] == 0
        and a.nb[0] == a.dtype.type_size
        and a.nb[0] <= a.nb[1]
        and b.nb[0] == b.dtype.type_size
        and b.dtype in (DType.F32, DType.F16, DType.BF16)
    )
    require(ok, "mul_mat", "shapes or layouts do not fit", a, b)
    out = Tensor(lib.ggml_mul_mat(arena.take(), a.ptr, b.ptr), arena)
    if f32_accumulate:
        lib.ggml_mul_mat_set_prec(out.raw, lib.GGML_PREC_F32)
    return out
