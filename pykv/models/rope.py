"""Rotary settings of a context: the model's, changed by what the caller asked for.

Source: spec params.md section 3, steps 3 to 9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pykv.errors import ParamError
from pykv.ggml import RopeParams
from pykv.models.hparams import ROPE_SCALINGS, HParams
from pykv.models.keys import FLOAT32_MAX, MAX_STRETCH
from pykv.typing import as_int, as_number


@dataclass(frozen=True)
class RopeRequest:
    """What a caller may change; None or 0 = as the model says, for YaRN's factors and betas also a negative number.

    Raises
    ------
    ParamError : names the field and its value.
    """

    scaling: str | None = None
    freq_base: float = 0.0
    freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        if self.scaling is not None and self.scaling not in ROPE_SCALINGS:
            raise ParamError(f"rope scaling={self.scaling!r} is unknown; known: {', '.join(ROPE_SCALINGS)}")
        self._take("freq_base", 1.0, FLOAT32_MAX)
        self._take("freq_scale", 1 / MAX_STRETCH, MAX_STRETCH)
        orig_ctx = as_int(self.yarn_orig_ctx)
        if orig_ctx is None or not 0 <= orig_ctx < 2**31:
            raise ParamError(f"rope yarn_orig_ctx={self.yarn_orig_ctx!r} must be a whole number in 0..2^31 - 1")
        object.__setattr__(self, "yarn_orig_ctx", orig_ctx)
        for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            value = getattr(self, name)
            number = as_number(value)
            if value is not None and (number is None or abs(number) > FLOAT32_MAX):
                raise ParamError(f"rope {name}={value!r} must be a number, or None for the model's own")
            object.__setattr__(self, name, number)

    def _take(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        number = as_number(value)
        if number is None or not (least <= number <= most or number == 0):
            raise ParamError(f"rope {name}={value!r} must be in {least:g}..{most:g}, or 0 for the model's own")
        object.__setattr__(self, name, number)


@dataclass(frozen=True)
class ContextRope:
    """Rotary settings with everything decided.

    Attributes
    ----------
    is_long : the context is longer than the model's first training, for models with two sets of factors.
    """

    scaling: str
    freq_base: float
    freq_scale: float
    n_ctx_orig: int
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    is_long: bool = False

    def params(self, n_dims: int, mode: str) -> RopeParams:
        return RopeParams(
            n_dims=n_dims,
            mode=mode,
            n_ctx_orig=self.n_ctx_orig,
            freq_base=self.freq_base,
            freq_scale=self.freq_scale,
            ext_factor=self.ext_factor,
            attn_factor=self.attn_factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )


def derive_rope(hparams: HParams, request: RopeRequest, n_ctx_seq: int) -> ContextRope:
    """Return the settings for a context of `n_ctx_seq` tokens per sequence."""
    model = hparams.rope_scaling
    scaling = request.scaling or model.kind
    freq_scale = request.freq_scale or model.freq_scale
    if scaling == "none":
        freq_scale = 1.0
    ext_factor = _pick(request.yarn_ext_factor, model.ext_factor)
    if ext_factor < 0:
        ext_factor = 1.0 if scaling == "yarn" else 0.0
    attn_factor = _pick(request.yarn_attn_factor, model.yarn_attn_factor)
    if ext_factor != 0:
        attn_factor = _yarn_attn_factor(1.0 / freq_scale, model.log_multiplier)
    n_ctx_orig = model.n_ctx_orig or hparams.n_ctx_train
    return ContextRope(
        scaling=scaling,
        freq_base=request.freq_base or hparams.rope_freq_base,
        freq_scale=freq_scale,
        n_ctx_orig=request.yarn_orig_ctx or n_ctx_orig,
        ext_factor=ext_factor,
        attn_factor=attn_factor * model.attn_factor,
        beta_fast=_pick(request.yarn_beta_fast, model.beta_fast),
        beta_slow=_pick(request.yarn_beta_slow, model.beta_slow),
        is_long=n_ctx_seq > n_ctx_orig,
    )


def _pick(asked: float | None, default: float) -> float:
    return default if asked is None or asked < 0 else asked


def _yarn_attn_factor(factor: float, log_multiplier: float) -> float:
    """Return the magnitude that a YaRN model expects, less what the rotation itself will multiply in."""
    attn = _magnitude(factor, 1.0)
    if log_multiplier:
        attn /= _magnitude(factor, log_multiplier)
    return attn / (1.0 + 0.1 * math.log(factor))


def _magnitude(scale: float, m: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0
