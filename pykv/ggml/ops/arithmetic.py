"""Elementwise operations, norms and the gated activation."""

from __future__ import annotations

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import FLOATS, can_repeat, is_evenly_spaced, require, require_dtype
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def add(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return a + b in the type of `a`, `b` (f32, or of that type) repeated to the shape of `a`."""
    _require_pair("add", a, b)
    return arena.node(lib.ggml_add, (a, b))


def mul(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return a * b elementwise in the type of `a`, `b` (f32, or of that type) repeated to the shape of `a`."""
    _require_pair("mul", a, b)
    return arena.node(lib.ggml_mul, (a, b))


def _require_pair(op: str, a: Tensor, b: Tensor) -> None:
    require_dtype(op, a, *FLOATS)
    require_dtype(op, b, DType.F32, a.dtype)
    require(can_repeat(b, a), op, "the second does not tile the first", a, b)
    require(a.has_dense_rows, op, "the rows of the first are not dense", a)


def scale(arena: Arena, a: Tensor, factor: float) -> Tensor:
    """Return a * factor, `a` contiguous."""
    require_dtype("scale", a, DType.F32)
    ok = a.is_contiguous and a.nb[2] == a.nb[1] * a.ne[1] and a.nb[3] == a.nb[2] * a.ne[2]
    require(ok, "scale", "wants a contiguous tensor", a)
    return arena.node(lib.ggml_scale, (a,), factor)


def tanh(arena: Arena, a: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element."""
    require_dtype("tanh", a, DType.F32)
    require(a.has_dense_rows, "tanh", "the rows are not dense", a)
    return arena.node(lib.ggml_tanh, (a,))


def rms_norm(arena: Arena, a: Tensor, eps: float) -> Tensor:
    """Return each row divided by its root mean square."""
    require_dtype("rms_norm", a, DType.F32)
    require(eps >= 0, "rms_norm", f"eps={eps} must be 0 or more", a)
    require(a.has_dense_rows, "rms_norm", "the rows are not dense", a)
    return arena.node(lib.ggml_rms_norm, (a,), eps)


def swiglu(arena: Arena, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, both f32 or both f16."""
    require_dtype("swiglu", gate, DType.F32, DType.F16)
    require(gate.ne == up.ne and gate.dtype == up.dtype, "swiglu", "operands differ", gate, up)
    ok = is_evenly_spaced(gate) and is_evenly_spaced(up)
    require(ok, "swiglu", "the rows are not evenly spaced", gate, up)
    return arena.node(lib.ggml_swiglu_split, (gate, up))


def column_max(arena: Arena, a: Tensor) -> Tensor:
    """Return the largest element of each column: `a` [m, n, n2, n3], contiguous → [m, 1, n2, n3], f32."""
    require_dtype("column_max", a, DType.F32)
    require(a.is_contiguous and max(a.ne[:2]) < 2**24, "column_max", "not contiguous, or too large", a)
    # note: ggml reckons the size of the result in floats, which count to 2^24
    return arena.node(lib.ggml_pool_2d, (a,), lib.GGML_OP_POOL_MAX, 1, a.ne[1], 1, a.ne[1], 0.0, 0.0)
