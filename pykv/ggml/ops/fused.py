"""Attention by pykv's own kernel: a custom operation, which only the CPU runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykv._native import ffi, lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

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

    `q` [Dk, H, n, S] f32, `k` [Dk, Hk, n_kv, S], `v` [Dv, Hk, n_kv, S], which may be the front of each row of `k`,
    `mask` [n_kv, n or more, 1, S or 1] f16 or f32, `sinks` [H] f32 → [Dv, H, n, S] f32. Rows of `k` and `v` are read
    with any strides, once for all queries if they are few. A query that sees no cell gets zeros. Results do not depend on the number
    of threads.

    Raises
    ------
    TensorError : the kernel does not cover the operands.
    """
    params = _params(scale, max_bias, logit_softcap)
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


def fused_attn_mass(
    arena: Arena,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    of: MassOf,
    *,
    scale: float,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `fused_attn` does, and the share of attention that each cell received; three nodes.

    The second is [n_kv, Hk, S] f32, or [n_kv, 1, S] with `of.all_heads`.

    Raises
    ------
    TensorError : the kernel does not cover the operands, or the weights do not fit them.
    """
    params = _params(scale, max_bias, logit_softcap, keep_weights=True)
    operands, weights = (q, k, v, mask, sinks), (of.head_weight, of.row_weight)
    given = {"attention": params[0], "end_row": q.ne[2], "largest": of.largest, "all_heads": of.all_heads}
    mass_params = ffi.new("struct pykv_attn_mass_params *", given)
    text = lib.pykv_attn_mass_misfit(_tensors(*operands), _weights(*map(_pointer, weights)), mass_params)
    require(
        text == ffi.NULL, "fused_attn_mass", f"does not cover {_text(text)}", *(x for x in weights if x is not None)
    )
    out = _attend(arena, "fused_attn_mass", operands, params)

    def build(context: Any, out: Any, head: Any, row: Any, *pointers: Any) -> Any:
        tensors = ffi.new("struct pykv_attn_tensors *", pointers)
        return lib.pykv_attn_build_mass(context, tensors, out, _weights(head, row), mass_params)

    arena.keep(mass_params)
    return out, arena.node(build, (out, *weights, *operands))


def _attend(arena: Arena, op: str, operands: tuple[Tensor | None, ...], params: Any) -> Tensor:
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
    return str(ffi.string(lib.pykv_attn_isa()).decode())


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
