"""Norms over rows, f32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require, require_dtype
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def norm(arena: Arena, a: Tensor, eps: float) -> Tensor:
    """Return each row less its mean, divided by the root of its variance plus `eps`."""
    return _normed(arena, "norm", lib.ggml_norm, a, eps)


def rms_norm(arena: Arena, a: Tensor, eps: float) -> Tensor:
    """Return each row divided by the root of its mean square plus `eps`."""
    return _normed(arena, "rms_norm", lib.ggml_rms_norm, a, eps)


def l2_norm(arena: Arena, a: Tensor, eps: float) -> Tensor:
    """Return each row divided by its length, at least `eps`."""
    return _normed(arena, "l2_norm", lib.ggml_l2_norm, a, eps)


def _normed(arena: Arena, op: str, function: Callable[..., Any], a: Tensor, eps: float) -> Tensor:
    require_dtype(op, a, DType.F32)
    require(eps >= 0, op, f"eps={eps} must be 0 or more", a)
    require(a.has_dense_rows, op, "the rows are not dense", a)
    return arena.node(function, (a,), eps)
