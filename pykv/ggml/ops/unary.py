"""Functions of each element, f32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require, require_dtype
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def neg(arena: Arena, a: Tensor) -> Tensor:
    """Return -a."""
    return _unary(arena, "neg", lib.ggml_neg, a)


def sqr(arena: Arena, a: Tensor) -> Tensor:
    """Return a * a."""
    return _unary(arena, "sqr", lib.ggml_sqr, a)


def sqrt(arena: Arena, a: Tensor) -> Tensor:
    """Return the square root, nan below zero."""
    return _unary(arena, "sqrt", lib.ggml_sqrt, a)


def exp(arena: Arena, a: Tensor) -> Tensor:
    """Return e to the power of a."""
    return _unary(arena, "exp", lib.ggml_exp, a)


def tanh(arena: Arena, a: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    return _unary(arena, "tanh", lib.ggml_tanh, a)


def sigmoid(arena: Arena, a: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-a))."""
    return _unary(arena, "sigmoid", lib.ggml_sigmoid, a)


def silu(arena: Arena, a: Tensor) -> Tensor:
    """Return a * sigmoid(a)."""
    return _unary(arena, "silu", lib.ggml_silu, a)


def gelu(arena: Arena, a: Tensor) -> Tensor:
    """Return a * Φ(a) by the tanh approximation (Hendrycks and Gimpel 2016); a CPU may look it up by `a` as f16."""
    return _unary(arena, "gelu", lib.ggml_gelu, a)


def relu(arena: Arena, a: Tensor) -> Tensor:
    """Return the larger of a and 0."""
    return _unary(arena, "relu", lib.ggml_relu, a)


def softplus(arena: Arena, a: Tensor) -> Tensor:
    """Return log(1 + exp(a))."""
    return _unary(arena, "softplus", lib.ggml_softplus, a)


def _unary(arena: Arena, op: str, function: Callable[..., Any], a: Tensor) -> Tensor:
    require_dtype(op, a, DType.F32)
    require(a.has_dense_rows, op, "the rows are not dense", a)
    return arena.node(function, (a,))
