"""Elementwise arithmetic: two tensors, or a tensor and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import (
    FLOATS,
    can_repeat,
    is_evenly_spaced,
    require,
    require_dtype,
    require_writable,
)
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def add(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return a + b in the type of `a`, `b` (f32, or of that type) repeated to the shape of `a`."""
    return _binary(arena, "add", lib.ggml_add, a, b)


def sub(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return a - b in the type of `a`, `b` (f32, or of that type) repeated to the shape of `a`."""
    return _binary(arena, "sub", lib.ggml_sub, a, b)


def mul(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return a * b elementwise in the type of `a`, `b` (f32, or of that type) repeated to the shape of `a`."""
    return _binary(arena, "mul", lib.ggml_mul, a, b)


def div(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return a / b in the type of `a`, `b` (f32, or of that type) repeated to the shape of `a`."""
    return _binary(arena, "div", lib.ggml_div, a, b)


def _binary(arena: Arena, op: str, function: Callable[..., Any], a: Tensor, b: Tensor) -> Tensor:
    require_dtype(op, a, *FLOATS)
    require_dtype(op, b, DType.F32, a.dtype)
    require(can_repeat(b, a), op, "the second does not tile the first", a, b)
    require(a.has_dense_rows, op, "the rows of the first are not dense", a)
    return arena.node(function, (a, b))


def scale(arena: Arena, a: Tensor, factor: float, bias: float = 0.0) -> Tensor:
    """Return a * factor + bias, `a` f32 and contiguous."""
    _require_whole("scale", a, DType.F32)
    return arena.node(lib.ggml_scale_bias, (a,), factor, bias)


def scale_inplace(arena: Arena, a: Tensor, factor: float) -> Tensor:
    """Multiply `a`, f32 and contiguous, by a factor; mutates `a`. Returns a view of it."""
    _require_whole("scale_inplace", a, DType.F32)
    require_writable("scale_inplace", a)
    return arena.node(lib.ggml_scale_inplace, (a,), factor, view_of=a)


def fill(arena: Arena, a: Tensor, value: float) -> Tensor:
    """Return a tensor of the type and shape of `a`, f32 or f16 and contiguous, that holds `value` everywhere."""
    _require_whole("fill", a, DType.F32, DType.F16)
    return arena.node(lib.ggml_fill, (a,), value)


def fill_inplace(arena: Arena, a: Tensor, value: float) -> Tensor:
    """Set every element of `a`, f32 or f16 and contiguous, to `value`; mutates `a`. Returns a view of it."""
    _require_whole("fill_inplace", a, DType.F32, DType.F16)
    require_writable("fill_inplace", a)
    return arena.node(lib.ggml_fill_inplace, (a,), value, view_of=a)


def _require_whole(op: str, a: Tensor, *dtypes: DType) -> None:
    require_dtype(op, a, *dtypes)
    # note: ggml looks at the strides of dims of one element too
    ok = a.is_contiguous and a.nb[2] == a.nb[1] * a.ne[1] and a.nb[3] == a.nb[2] * a.ne[2]
    require(ok, op, "wants a contiguous tensor", a)


def clamp(arena: Arena, a: Tensor, low: float, high: float) -> Tensor:
    """Raise elements of `a`, f32 or f16, to `low`, and lower them to `high`; mutates `a`. Returns a view of it."""
    require_dtype("clamp", a, DType.F32, DType.F16)
    require(low <= high, "clamp", f"low={low} must be at most high={high}", a)
    require(is_evenly_spaced(a), "clamp", "the rows are not evenly spaced", a)
    require_writable("clamp", a)
    return arena.node(lib.ggml_clamp, (a,), low, high, view_of=a)
