"""Rotary positions against the formula of the papers."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from support.cpu_graph import run
from support.naive_rope import naive_rope

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, RopeParams, Tensor, ops

RNG = np.random.default_rng(9)
POS = np.array([0, 1, 2, 77, 1000, 8191], np.int32)

AXES = np.array([POS, POS[::-1], [5, 4, 3, 2, 1, 0], [9, 0, 9, 0, 9, 7]], np.int32)

YARN = {"n_ctx_orig": 256, "freq_scale": 0.25, "ext_factor": 1.0}
PARAMS = {
    "plain": RopeParams(32),
    "neox": RopeParams(32, "neox"),
    "part of a head": RopeParams(16),
    "part of a head, neox": RopeParams(16, "neox"),
    "two dims": RopeParams(2, "neox"),
    "another base": RopeParams(32, freq_base=500000.0),
    "linear": RopeParams(32, freq_scale=0.5),
    "yarn": RopeParams(32, **YARN),
    "yarn, neox": RopeParams(32, "neox", **YARN),
    "yarn, part of a head": RopeParams(24, **YARN),
    "yarn, other betas": RopeParams(32, "neox", **YARN, beta_fast=8.0, beta_slow=2.0, freq_base=1e6),
    "yarn, half, louder": RopeParams(32, n_ctx_orig=4096, freq_scale=0.1, ext_factor=0.5, attn_factor=1.25),
}

SEVERAL_AXES = {
    "mrope": RopeParams(32, "mrope", sections=(4, 6, 6, 0)),
    "mrope, four axes": RopeParams(32, "mrope", sections=(4, 4, 4, 4)),
    "mrope, sections again and again": RopeParams(32, "mrope", sections=(2, 1, 3, 0)),
    "mrope, part of a head": RopeParams(24, "mrope", sections=(4, 4, 4, 0)),
    "mrope, one axis": RopeParams(32, "mrope", sections=(16, 0, 0, 0)),
    "mrope, yarn": RopeParams(32, "mrope", sections=(4, 6, 6, 0), **YARN),
    "imrope": RopeParams(32, "imrope", sections=(6, 5, 5, 0)),
    "imrope, some left": RopeParams(32, "imrope", sections=(4, 3, 3, 6)),
    "imrope, part of a head": RopeParams(24, "imrope", sections=(6, 3, 3, 0)),
}

# angles are f32: at position 8191 they carry an error of 8191 * 2^-24 * a few
ATOL = 5e-3


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def rotate(x: np.ndarray, params: RopeParams, factors: np.ndarray | None = None) -> np.ndarray:
    pos = POS if params.n_axes == 1 else AXES.reshape(-1)
    operands = [x, pos] if factors is None else [x, pos, factors]
    return run(lambda c, t, p, *f: ops.rope(c, t, p, params, *f), *operands)[0]


@pytest.mark.parametrize("name", PARAMS)
def test_against_the_formula(name):
    x = normal(6, 3, 32)
    out = rotate(x, PARAMS[name])
    assert np.allclose(out, naive_rope(x, POS, **asdict(PARAMS[name])), atol=ATOL)
    # positions 0 to 2 have no such error
    assert np.allclose(out[:3], naive_rope(x, POS, **asdict(PARAMS[name]))[:3], atol=5e-6)


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_several_axes_against_the_formula(name):
    x = normal(6, 3, 32)
    params = SEVERAL_AXES[name]
    assert np.allclose(rotate(x, params), naive_rope(x, AXES, **asdict(params)), atol=ATOL)


@pytest.mark.parametrize("mode", ["mrope", "imrope"])
def test_equal_positions_on_all_axes_are_plain_rope(mode):
    x = normal(6, 2, 32)
    params = RopeParams(32, mode, sections=(6, 5, 5, 0))
    out = run(lambda c, t, p: ops.rope(c, t, p, params), x, np.tile(POS, 4))[0]
    assert np.allclose(out, naive_rope(x, POS, n_dims=32, mode="neox"), atol=ATOL)


def test_factors_with_several_axes():
    x, factors = normal(6, 2, 32), np.linspace(1, 8, 16).astype(np.float32)
    params = RopeParams(32, "mrope", sections=(4, 6, 6, 0))
    expect = naive_rope(x, AXES, **asdict(params), factors=factors)
    assert np.allclose(rotate(x, params, factors), expect, atol=ATOL)


@pytest.mark.parametrize("mode", ["norm", "neox"])
@pytest.mark.parametrize(("n_dims", "n_factors"), [(32, 16), (16, 8), (16, 16)])
def test_factors_divide_the_frequencies(mode, n_dims, n_factors):
    x, factors = normal(6, 2, 32), np.linspace(1, 8, n_factors).astype(np.float32)
    params = RopeParams(n_dims, mode)
    expect = naive_rope(x, POS, **asdict(params), factors=factors)
    assert np.allclose(rotate(x, params, factors), expect, atol=ATOL)


def test_f16():
    x = normal(6, 3, 32).astype(np.float16)
    out = rotate(x, RopeParams(32))
    assert out.dtype == np.float16
    assert np.allclose(out, naive_rope(x, POS, n_dims=32), atol=ATOL)


def test_a_view_with_gaps_between_heads():
    x = normal(6, 2, 40)

    def build(c: Arena, t: Tensor, p: Tensor) -> Tensor:
        heads = ops.view(c, t, (32, 2, 6, 1), (t.nb[1], t.nb[2], t.nb[3]), 8 * 4)
        return ops.rope(c, heads, p, RopeParams(32))

    assert np.allclose(run(build, x, POS)[0], naive_rope(x[..., 8:], POS, n_dims=32), atol=ATOL)


def test_there_and_back():
    x = normal(6, 2, 32)

    def build(c: Arena, t: Tensor, p: Tensor, back: Tensor) -> Tensor:
        return ops.rope(c, ops.rope(c, t, p, RopeParams(32)), back, RopeParams(32))

    assert np.allclose(run(build, x, POS, -POS)[0], x, atol=ATOL)


@pytest.fixture
def arena() -> Arena:
    return Arena(64)


@pytest.mark.parametrize(
    "params",
    [
        RopeParams(0),
        RopeParams(-2),
        RopeParams(7),
        RopeParams(34),
        RopeParams(32, "mrope"),
        RopeParams(32, "imrope", sections=(0, 0, 0, 16)),
        RopeParams(32, "mrope", sections=(-1, 9, 8, 0)),
        RopeParams(32, "mrope", sections=(11, 11, 11, 0)),
        RopeParams(32, "mrope", sections=(2**31, 2**31, 2**31, 0)),
        RopeParams(32, "mrope", sections=(16, 0, 0)),
        RopeParams(32, "neox", sections=(8, 8, 0, 0)),
        RopeParams(32, "vision", sections=(8, 8, 0, 0)),
        RopeParams(32, n_ctx_orig=-1),
        RopeParams(32, n_ctx_orig=2**31),
    ],
)
def test_params_that_do_not_fit(arena, params):
    x, pos = arena.tensor(DType.F32, (32, 2, 6)), arena.tensor(DType.I32, (6,))
    with pytest.raises(TensorError, match="rope: RopeParams"):
        ops.rope(arena, x, pos, params)


def test_positions_on_several_axes_that_do_not_fit(arena):
    x, params = arena.tensor(DType.F32, (32, 2, 6)), RopeParams(32, "mrope", sections=(4, 6, 6, 0))
    for wrong in ((6,), (18,), (6, 4), (25,)):
        with pytest.raises(TensorError, match="one position per token and axis"):
            ops.rope(arena, x, arena.tensor(DType.I32, wrong), params)


def test_operands_that_do_not_fit(arena):
    params = RopeParams(32)
    x, pos = arena.tensor(DType.F32, (32, 2, 6)), arena.tensor(DType.I32, (6,))
    for wrong in ((5,), (6, 2), (3, 2)):
        with pytest.raises(TensorError, match="one position"):
            ops.rope(arena, x, arena.tensor(DType.I32, wrong), params)
    spread = arena.tensor(DType.I32, (2, 6))
    column = ops.view(arena, spread, (1, 6, 1, 1), (spread.nb[1], spread.nb[2], spread.nb[3]))
    with pytest.raises(TensorError, match="one position"):
        ops.rope(arena, x, ops.transpose(arena, column), params)
    with pytest.raises(TensorError, match="wants i32"):
        ops.rope(arena, x, arena.tensor(DType.I64, (6,)), params)
    for dtype in (DType.BF16, DType.Q8_0, DType.I32):
        with pytest.raises(TensorError, match="wants f32 or f16"):
            ops.rope(arena, arena.tensor(dtype, (32, 2, 6)), pos, params)
    with pytest.raises(TensorError, match="dense"):
        ops.rope(arena, ops.permute(arena, arena.tensor(DType.F32, (2, 32, 6)), 1, 0, 2, 3), pos, params)
    with pytest.raises(TensorError, match="even"):
        ops.rope(arena, arena.tensor(DType.F32, (33, 2, 6)), pos, params)
    for factors in (arena.tensor(DType.F32, (15,)), arena.tensor(DType.F16, (16,))):
        with pytest.raises(TensorError, match=r"rope: (factors|wants f32)"):
            ops.rope(arena, x, pos, params, factors)
