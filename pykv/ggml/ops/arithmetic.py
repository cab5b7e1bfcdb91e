"""Elementwise operations, norms and the gated activation."""

from __future__ import annotations

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import can_repeat, require, require_dtype
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def add(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return a + b, `b` repeated to the shape of `a`."""
    require(can_repeat(b, a), "add", "the second does not tile the first", a, b)
    return Tensor(lib.ggml_add(arena.take(), a.ptr, b.ptr), arena)


def mul(arena: Arena, a: Tensor, b: Tensor) -> Tensor:
    """Return a * b elementwise, `b` repeated to the shape of `a`."""
    require(can_repeat(b, a), "mul", "the second does not tile the first", a, b)
    return Tensor(lib.ggml_mul(arena.take(), a.ptr, b.ptr), arena)


def scale(arena: Arena, a: Tensor, factor: float) -> Tensor:
    """Return a * factor."""
    require_dtype("scale", a, DType.F32)
    return Tensor(lib.ggml_scale(arena.take(), a.ptr, factor), arena)


def tanh(arena: Arena, a: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element."""
    require_dtype("tanh", a, DType.F32)
    return Tensor(lib.ggml_tanh(arena.take(), a.ptr), arena)


def rms_norm(arena: Arena, a: Tensor, eps: float) -> Tensor:
    """Return each row divided by its root mean square."""
    require_dtype("rms_norm", a, DType.F32)
    require(eps >= 0, "rms_norm", f"eps={eps} is negative", a)
    return Tensor(lib.ggml_rms_norm(arena.take(), a.ptr, eps), arena)


def swiglu(arena: Arena, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    require(gate.ne == up.ne and gate.dtype == up.dtype, "swiglu", "operands differ", gate, up)
    return Tensor(lib.ggml_swiglu_split(arena.take(), gate.ptr, up.ptr), arena)
