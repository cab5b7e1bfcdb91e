"""Attention by pykv's own kernel: a custom operation, which only the CPU runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pykv._native import ffi, lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType
from pykv.log import logger

_LOG = logger(__name__)
_F32_MAX = float(np.finfo(np.float32).max)

FUSED_MAX_ROWS = int(lib.PYKV_ATTN_FEW_ROWS)
"""Up to so many query rows of a stream the cells are shared among threads, and attention mass can be had."""


def fused_attn_misfit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> str | None:
    """Return what about the operands of `fused_attn` the kernel does not cover, None if it covers them."""
    return _misfit(_tensors(q, k, v, mask, sinks), _params(1.0, 0.0, 0.0))


def fused_attn(
    arena: Arena,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention; two nodes, or one for more than `FUSED_MAX_ROWS` query rows of a stream.

    `max_bias` and `logit_softcap` are not negative, 0 = none.

    `q` [Dk, H, n, S] f32, `k` [Dk, Hk, n_kv, S], `v` [Dv, Hk, n_kv, S], which may be the front of each row of `k`,
    `mask` [n_kv, n or more, 1, S or 1] f16 or f32, `sinks` [H] f32 → [Dv, H, n, S] f32. Rows of `k` and `v` are read
    with any strides, once for all queries if they are few. A query that sees no cell gets zeros, one that sees NaN gets
    NaN. Results do not depend on the number of threads.

    Raises
    ------
    TensorError : the kernel does not cover the operands, or a parameter is not finite or too small.
    """
    params = _checked("fused_attn", scale, max_bias, logit_softcap)
    return _attend(arena, "fused_attn", (q, k, v, mask, sinks), params)


@dataclass(frozen=True)
class MassOf:
    """Which part of an attention to add up.

    Attributes
    ----------
    head_weight : [H] f32, what a head's share counts; None = 1.
    row_weight : [n, S] f32, what a row's share counts; None = 1.
    largest : the largest share instead of the sum.
    all_heads : all KV heads together.
    """

    head_weight: Tensor | None = None
    row_weight: Tensor | None = None
    largest: bool = False
    all_heads: bool = True


def fused_attn_masses(
    arena: Arena,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ofs: Sequence[MassOf],
    *,
    scale: float,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return what `fused_attn` does, and for each of `ofs` the share of attention that each cell received.

    Shares are [n_kv, Hk, S] f32, or [n_kv, 1, S] with `all_heads`. Two nodes, and one for each of `ofs`.

    Raises
    ------
    TensorError : the kernel does not cover the operands, or the weights do not fit them.
    """
    params = _checked("fused_attn_masses", scale, max_bias, logit_softcap, keep_weights=True)
    operands = (q, k, v, mask, sinks)
    asked = [_mass_params(params, operands, of) for of in ofs]
    out = _attend(arena, "fused_attn_masses", operands, params)
    return out, [_mass(arena, out, operands, of, its) for of, its in zip(ofs, asked, strict=True)]


def _mass_params(params: Any, operands: tuple[Tensor | None, ...], of: MassOf) -> Any:
    """Return what the node for one mass is given, once it is known to fit."""
    q, weights = operands[0], (of.head_weight, of.row_weight)
    assert q is not None
    given = {"attention": params[0], "end_row": q.ne[2], "largest": of.largest, "all_heads": of.all_heads}
    asked = ffi.new("struct pykv_attn_mass_params *", given)
    text = lib.pykv_attn_mass_misfit(_tensors(*operands), _weights(*map(_pointer, weights)), asked)
    named = (x for x in weights if x is not None)
    require(text == ffi.NULL, "fused_attn_masses", f"does not cover {_text(text)}", *named)
    return asked


def _mass(arena: Arena, out: Tensor, operands: tuple[Tensor | None, ...], of: MassOf, params: Any) -> Tensor:
    def build(context: Any, out: Any, head: Any, row: Any, *pointers: Any) -> Any:
        tensors = ffi.new("struct pykv_attn_tensors *", pointers)
        return lib.pykv_attn_build_mass(context, tensors, out, _weights(head, row), params)

    arena.keep(params)  # the node points to it
    return arena.node(build, (out, of.head_weight, of.row_weight, *operands))


def _attend(arena: Arena, op: str, operands: tuple[Tensor | None, ...], params: Any) -> Tensor:
    _report_isa()
    misfit = _misfit(_tensors(*operands), params)
    require(misfit is None, op, f"does not cover {misfit}", *(x for x in operands if x is not None))
    q, v = operands[0], operands[2]
    assert q is not None
    assert v is not None
    DType.F32.check_size((v.ne[0], *q.ne[1:]))

    def build(context: Any, *pointers: Any) -> Any:
        return lib.pykv_attn_build(context, ffi.new("struct pykv_attn_tensors *", pointers), params)

    arena.keep(params)  # the nodes point to it
    return arena.node(build, operands, n_nodes=2 if q.ne[2] <= FUSED_MAX_ROWS else 1)


def fused_isa() -> str:
    """Return the instruction set that the kernel uses; the environment's PYKV_ATTENTION_ISA may name a lesser one."""
    _report_isa()
    return _isa()


def _isa() -> str:
    return str(ffi.string(lib.pykv_attn_isa()).decode())


@cache
def _report_isa() -> None:
    """Say once if the instruction set in use is not the one that was asked for."""
    asked = os.environ.get("PYKV_ATTENTION_ISA")
    if asked is not None and asked != _isa():
        _LOG.warning("PYKV_ATTENTION_ISA=%r: this machine or build has no such kernel; %s is used", asked, _isa())


def _checked(op: str, scale: float, max_bias: float, softcap: float, keep_weights: bool = False) -> Any:
    """Return the parameters, which must be finite in f32, as C has them."""
    given = {"scale": scale, "max_bias": max_bias, "logit_softcap": softcap}
    for name, value in given.items():
        low = -_F32_MAX if name == "scale" else 0
        require(_is_number(value) and low <= value <= _F32_MAX, op, f"{name} = {value!r}, not a number in f32")
    return _params(scale, max_bias, softcap, keep_weights)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)


def _params(scale: float, max_bias: float, softcap: float, keep_weights: bool = False) -> Any:
    given = {"scale": scale, "max_bias": max_bias, "softcap": softcap, "keep_weights": keep_weights}
    return ffi.new("struct pykv_attn_params *", given)


def _tensors(*operands: Tensor | None) -> Any:
    return ffi.new("struct pykv_attn_tensors *", [*map(_pointer, operands)])


def _weights(head: Any, row: Any) -> Any:
    return ffi.new("struct pykv_attn_weights *", [head, row])


def _pointer(operand: Tensor | None) -> Any:
    return ffi.NULL if operand is None else operand.ptr


def _misfit(tensors: Any, params: Any) -> str | None:
    return _text(lib.pykv_attn_misfit(tensors, params))


def _text(text: Any) -> str | None:
    return None if text == ffi.NULL else str(ffi.string(text).decode())
