"""Softmax with a mask, and ggml's flash attention; both with sinks."""

from __future__ import annotations

from typing import Any

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import STORABLE, require, require_dtype
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def soft_max(
    arena: Arena,
    a: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    max_bias: float = 0.0,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax of a * scale + mask along rows, `a` f32 and contiguous.

    `mask` [n, rows, m2, m3] f16 or f32 repeats over dims 2 and 3; a `max_bias` (ALiBi) needs one. `sinks` [n2] f32 are
    scores, one for each of dim 2 of `a`, that take part in the softmax and are left out of the result.
    """
    require_dtype("soft_max", a, DType.F32)
    require(a.is_contiguous, "soft_max", "wants a contiguous tensor", a)
    if mask is not None:
        require_dtype("soft_max", mask, DType.F32, DType.F16)
        ok = (
            mask.is_contiguous
            and mask.ne[0] == a.ne[0]
            and mask.ne[1] >= a.ne[1]
            and a.ne[2] % mask.ne[2] == 0
            and a.ne[3] % mask.ne[3] == 0
        )
        require(ok, "soft_max", "the mask does not fit", a, mask)
    require(mask is not None or not max_bias > 0, "soft_max", f"max_bias={max_bias} needs a mask", a)
    _require_sinks("soft_max", sinks, a)

    def build(context: Any, a: Any, mask: Any, sinks: Any) -> Any:
        out = lib.ggml_soft_max_ext(context, a, mask, scale, max_bias)
        lib.ggml_soft_max_add_sinks(out, sinks)
        return out

    return arena.node(build, (a, mask, sinks))


def _require_sinks(op: str, sinks: Tensor | None, a: Tensor) -> None:
    if sinks is not None:
        require_dtype(op, sinks, DType.F32)
        require(sinks.ne == (a.ne[2], 1, 1, 1) and sinks.is_contiguous, op, "wants one sink a head", sinks, a)


def flash_attn(
    arena: Arena,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return fused attention.

    `q` [Dk, n, H, S] f32, `k` [Dk, n_kv, Hk, S], `v` [Dv, n_kv, Hk, S], `mask` [n_kv, n, 1, S] f16, `sinks` [H] f32, a
    score for each head that takes part in the softmax and has no value → [Dv, H, n, S] f32.
    """
    require_dtype("flash_attn", q, DType.F32)
    require_dtype("flash_attn", mask, DType.F16)
    for stored in (k, v):
        require_dtype("flash_attn", stored, *STORABLE)
    ok = (
        q.ne[0] == k.ne[0]
        and k.ne[1] == v.ne[1] == mask.ne[0]
        and k.ne[2] == v.ne[2]
        and q.ne[2] % k.ne[2] == 0
        and q.ne[3] == k.ne[3] == v.ne[3]
        and mask.is_contiguous
        and mask.ne[1] >= q.ne[1]
        and q.ne[2] % mask.ne[2] == 0
        and q.ne[3] % mask.ne[3] == 0
        and all(t.has_dense_rows for t in (q, k, v))
    )
    require(ok, "flash_attn", "shapes or layouts do not fit", q, k, v, mask)
    DType.F32.check_size((v.ne[0], q.ne[2], q.ne[1], q.ne[3]))
    _require_sinks("flash_attn", sinks, q)

    def build(context: Any, q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
        out = lib.ggml_flash_attn_ext(context, q, k, v, mask, scale, max_bias, logit_softcap)
        lib.ggml_flash_attn_ext_add_sinks(out, sinks)
        lib.ggml_flash_attn_ext_set_prec(out, lib.GGML_PREC_F32)
        return out

    return arena.node(build, (q, k, v, mask, sinks))
