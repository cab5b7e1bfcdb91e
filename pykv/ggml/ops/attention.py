"""Rotary positions, softmax with a mask, and fused attention."""

from __future__ import annotations

from dataclasses import dataclass

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import STORABLE, require, require_dtype
from pykv.ggml.ops.shape import pad
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

_ROPE_MODES = {"norm": lib.GGML_ROPE_TYPE_NORMAL, "neox": lib.GGML_ROPE_TYPE_NEOX}


@dataclass(frozen=True)
class RopeParams:
    """How positions turn into rotations.

    Attributes
    ----------
    n_dims : elements of a head that are rotated, even; the rest passes through.
    mode : "norm" pairs neighbours, "neox" pairs the two halves.
    n_ctx_orig : context length the model was trained at, for YaRN.
    freq_base, freq_scale : base of the frequencies; factor on positions.
    ext_factor, attn_factor, beta_fast, beta_slow : YaRN; an `ext_factor` of 0 turns it off.
    """

    n_dims: int
    mode: str = "norm"
    n_ctx_orig: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def rope(arena: Arena, a: Tensor, pos: Tensor, params: RopeParams, factors: Tensor | None = None) -> Tensor:
    """Rotate `a` [head, n_head, n_tokens] by `pos` [n_tokens] i32; `factors` [n_dims/2] f32 divide the frequencies."""
    require_dtype("rope", a, DType.F32, DType.F16)
    require_dtype("rope", pos, DType.I32)
    ok = 0 < params.n_dims <= a.ne[0] and params.n_dims % 2 == 0 and params.mode in _ROPE_MODES
    require(ok and 0 <= params.n_ctx_orig < 2**31, "rope", f"{params} does not fit", a)
    require(a.has_dense_rows and a.ne[0] % 2 == 0, "rope", "wants dense rows of an even length", a)
    require(pos.ne == (a.ne[2], 1, 1, 1) and pos.is_contiguous, "rope", "one position per token", a, pos)
    if factors is not None:
        require_dtype("rope", factors, DType.F32)
        ok = factors.ne[0] >= params.n_dims // 2 and factors.has_dense_rows
        require(ok, "rope", "factors are too few or not dense", factors)
        # note: ggml reads one factor for each pair of the whole head, also for pairs that stay as they are
        if factors.ne[0] < a.ne[0] // 2:
            factors = pad(arena, factors, a.ne[0] // 2 - factors.ne[0])
    return arena.node(
        lib.ggml_rope_ext,
        (a, pos, factors),
        params.n_dims,
        _ROPE_MODES[params.mode],
        params.n_ctx_orig,
        params.freq_base,
        params.freq_scale,
        params.ext_factor,
        params.attn_factor,
        params.beta_fast,
        params.beta_slow,
    )


def soft_max(arena: Arena, a: Tensor, mask: Tensor, scale: float, max_bias: float = 0.0) -> Tensor:
    """Return softmax of a * scale + mask along rows; `mask` [n, rows, m2, m3] f16 or f32 repeats over dims 2 and 3."""
    require_dtype("soft_max", a, DType.F32)
    require_dtype("soft_max", mask, DType.F32, DType.F16)
    ok = (
        a.is_contiguous
        and mask.is_contiguous
        and mask.ne[0] == a.ne[0]
        and mask.ne[1] >= a.ne[1]
        and a.ne[2] % mask.ne[2] == 0
        and a.ne[3] % mask.ne[3] == 0
    )
    require(ok, "soft_max", "the mask does not fit", a, mask)
    return arena.node(lib.ggml_soft_max_ext, (a, mask), scale, max_bias)


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
) -> Tensor:
    """Return fused attention.

    `q` [Dk, n, H, S] f32, `k` [Dk, n_kv, Hk, S], `v` [Dv, n_kv, Hk, S], `mask` [n_kv, n, 1, S] f16 → [Dv, H, n, S] f32.
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
    out = arena.node(lib.ggml_flash_attn_ext, (q, k, v, mask), scale, max_bias, logit_softcap)
    lib.ggml_flash_attn_ext_set_prec(out.raw, lib.GGML_PREC_F32)
    return out
