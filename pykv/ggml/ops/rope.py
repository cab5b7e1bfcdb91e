"""Rotary positions, on one axis or on several."""

from __future__ import annotations

from dataclasses import dataclass

from pykv._native import ffi, lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require, require_dtype
from pykv.ggml.ops.shape import pad
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

_ONE_AXIS = {"norm": lib.GGML_ROPE_TYPE_NORMAL, "neox": lib.GGML_ROPE_TYPE_NEOX}
_AXES = {"mrope": lib.GGML_ROPE_TYPE_MROPE, "imrope": lib.GGML_ROPE_TYPE_IMROPE}
_MODES = _ONE_AXIS | _AXES
N_AXES = 4


@dataclass(frozen=True)
class RopeParams:
    """How positions turn into rotations.

    Attributes
    ----------
    n_dims : elements of a head that are rotated, even; the rest passes through.
    mode : "norm" pairs neighbours, "neox" pairs the two halves; "mrope" and "imrope" do too, by positions on four axes.
    n_ctx_orig : context length the model was trained at, for YaRN.
    freq_base, freq_scale : base of the frequencies; factor on positions.
    ext_factor, attn_factor, beta_fast, beta_slow : YaRN; an `ext_factor` of 0 turns it off.
    sections : of "mrope" and "imrope": how many pairs follow each axis, one run an axis in "mrope", in turns of three
        in "imrope".
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
    sections: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def n_axes(self) -> int:
        """Positions that each token has."""
        return N_AXES if self.mode in _AXES else 1

    @property
    def has_fitting_sections(self) -> bool:
        """Whether there are sections exactly where the mode wants some."""
        if len(self.sections) != N_AXES or min(self.sections) < 0:
            return False
        return any(self.sections[:3]) if self.mode in _AXES else not any(self.sections)


def rope(arena: Arena, a: Tensor, pos: Tensor, params: RopeParams, factors: Tensor | None = None) -> Tensor:
    """Rotate `a` [head, n_head, n_tokens] by `pos` i32; `factors` [n_dims/2] f32 divide the frequencies.

    `pos` is [n_tokens], or [4 * n_tokens] where positions have four axes: those of the first axis, then of the next.
    """
    _require_rope(a, pos, params)
    if factors is not None:
        require_dtype("rope", factors, DType.F32)
        ok = factors.ne[0] >= params.n_dims // 2 and factors.has_dense_rows
        require(ok, "rope", "factors are too few or not dense", factors)
        # note: ggml reads one factor for each pair of the whole head, also for pairs that stay as they are
        if factors.ne[0] < a.ne[0] // 2:
            factors = pad(arena, factors, a.ne[0] // 2 - factors.ne[0])
    sections = (ffi.new("int[4]", params.sections),) if params.mode in _AXES else ()
    return arena.node(
        lib.ggml_rope_multi if sections else lib.ggml_rope_ext,
        (a, pos, factors),
        params.n_dims,
        *sections,
        _MODES[params.mode],
        params.n_ctx_orig,
        params.freq_base,
        params.freq_scale,
        params.ext_factor,
        params.attn_factor,
        params.beta_fast,
        params.beta_slow,
    )


def _require_rope(a: Tensor, pos: Tensor, params: RopeParams) -> None:
    require_dtype("rope", a, DType.F32, DType.F16)
    require_dtype("rope", pos, DType.I32)
    ok = (
        0 < params.n_dims <= a.ne[0]
        and params.n_dims % 2 == 0
        and params.mode in _MODES
        and params.has_fitting_sections
        and sum(params.sections) <= a.ne[0]
        and 0 <= params.n_ctx_orig < 2**31
    )
    require(ok, "rope", f"{params} does not fit", a)
    require(a.has_dense_rows and a.ne[0] % 2 == 0, "rope", "wants dense rows of an even length", a)
    ok = pos.ne == (a.ne[2] * params.n_axes, 1, 1, 1) and pos.is_contiguous
    require(ok, "rope", "one position per token and axis", a, pos)
