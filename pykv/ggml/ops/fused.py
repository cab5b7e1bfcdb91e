"""Attention of a few query rows by pykv's own kernel: a custom operation, which only the CPU runs."""

from __future__ import annotations

from typing import Any

from pykv._native import ffi, lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

FUSED_MAX_ROWS = int(lib.PYKV_ATTN_MAX_ROWS)
"""Query rows of a stream, at most."""


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
    """Return attention of up to `FUSED_MAX_ROWS` query rows of each stream, two nodes.

    `q` [Dk, H, n, S] f32, `k` [Dk, Hk, n_kv, S], `v` [Dv, Hk, n_kv, S], which may be the front of each row of `k`,
    `mask` [n_kv, n or more, 1, S or 1] f16 or f32, `sinks` [H] f32 → [Dv, H, n, S] f32. Rows of `k` and `v` are read
    with any strides, once for all queries. A query that sees no cell gets zeros. Results do not depend on the number
    of threads.

    Raises
    ------
    TensorError : the kernel does not cover the operands.
    """
    params = _params(scale, max_bias, logit_softcap)
    operands = (q, k, v, mask, sinks)
    misfit = _misfit(_tensors(*operands), params)
    require(misfit is None, "fused_attn", f"does not cover {misfit}", *(x for x in operands if x is not None))
    DType.F32.check_size((v.ne[0], q.ne[1], q.ne[2], q.ne[3]))

    def build(context: Any, *pointers: Any) -> Any:
        return lib.pykv_attn_build(context, ffi.new("struct pykv_attn_tensors *", pointers), params)

    arena.keep(params)  # the nodes point to it
    return arena.node(build, operands, n_nodes=2)


def fused_isa() -> str:
    """Return the instruction set that the kernel uses; the environment's PYKV_ATTENTION_ISA may name a lesser one."""
    return str(ffi.string(lib.pykv_attn_isa()).decode())


def _params(scale: float, max_bias: float, softcap: float) -> Any:
    given = {"scale": scale, "max_bias": max_bias, "softcap": softcap, "keep_weights": False}
    return ffi.new("struct pykv_attn_params *", given)


def _tensors(*operands: Tensor | None) -> Any:
    pointers = [ffi.NULL if operand is None else operand.ptr for operand in operands]
    return ffi.new("struct pykv_attn_tensors *", pointers)


def _misfit(tensors: Any, params: Any) -> str | None:
    text = lib.pykv_attn_misfit(tensors, params)
    return None if text == ffi.NULL else str(ffi.string(text).decode())
