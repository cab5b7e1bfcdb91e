"""Gated activations: a function of one tensor, times another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import is_evenly_spaced, require, require_dtype
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def swiglu(arena: Arena, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, both f32 or both f16."""
    return _gated(arena, "swiglu", lib.ggml_swiglu_split, gate, up)


def geglu(arena: Arena, gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, both f32 or both f16."""
    return _gated(arena, "geglu", lib.ggml_geglu_split, gate, up)


def swiglu_oai(arena: Arena, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return g * sigmoid(alpha * g) * (u + 1), f32: g is `gate` up to `limit`, u is `up` between -limit and limit."""
    require_dtype("swiglu_oai", gate, DType.F32)
    return _gated(arena, "swiglu_oai", lib.ggml_swiglu_oai, gate, up, alpha, limit)


def _gated(arena: Arena, op: str, function: Callable[..., Any], gate: Tensor, up: Tensor, *numbers: float) -> Tensor:
    require_dtype(op, gate, DType.F32, DType.F16)
    require(gate.ne == up.ne and gate.dtype == up.dtype, op, "operands differ", gate, up)
    require(is_evenly_spaced(gate) and is_evenly_spaced(up), op, "the rows are not evenly spaced", gate, up)
    return arena.node(function, (gate, up), *numbers)
