"""Rotary settings of a context: params.md section 3, steps 3 to 9, against the same rules written down again."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pykv.errors import ParamError
from pykv.models import HParams, RopeRequest, derive_rope
from pykv.models.hparams import RopeScaling

HP = HParams(
    architecture="llama", n_layer=1, n_embd=64, n_vocab=8, n_ctx_train=4096, n_head_by_layer=(1,),
    n_head_kv_by_layer=(1,), n_ff_by_layer=(64,), n_embd_head_k=64, n_embd_head_v=64, n_rot=64, norm_rms_eps=1e-5,
    rope_freq_base=1e6, rope_scaling=RopeScaling(), attention_scale=0.0,
)  # fmt: skip


def given(request: RopeRequest = RopeRequest(), n_ctx_seq: int = 4096, **scaling):  # noqa: B008
    return derive_rope(replace(HP, rope_scaling=RopeScaling(**scaling)), request, n_ctx_seq)


def expected_attn(factor: float, log_multiplier: float = 0.0) -> float:
    """Step 8, in the words of the specification."""

    def ms(s: float, m: float) -> float:
        return 1.0 if s <= 1 else 0.1 * m * math.log(s) + 1

    attn = ms(factor, 1) / ms(factor, log_multiplier) if log_multiplier else ms(factor, 1)
    return attn * 1 / (1 + 0.1 * math.log(factor))


def test_a_plain_model_keeps_its_own_settings() -> None:
    rope = given()
    assert (rope.scaling, rope.freq_base, rope.freq_scale, rope.n_ctx_orig) == ("linear", 1e6, 1.0, 4096)
    assert (rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow) == (0.0, 1.0, 32.0, 1.0)
    assert not rope.is_long


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 32.0])
@pytest.mark.parametrize("multiplier", [0.0, 0.707, 1.0])
@pytest.mark.parametrize("attn_factor", [1.0, 1.25])
def test_yarn_magnitude(factor: float, multiplier: float, attn_factor: float) -> None:
    rope = given(
        kind="yarn", freq_scale=1 / factor, log_multiplier=multiplier, attn_factor=attn_factor, yarn_attn_factor=3.0
    )
    assert rope.ext_factor == 1.0
    # with YaRN the file's own magnitude is replaced, the general one multiplied in
    np.testing.assert_allclose(rope.attn_factor, expected_attn(factor, multiplier) * attn_factor, rtol=1e-12)


def test_without_yarn_the_magnitude_is_what_the_model_or_the_caller_says() -> None:
    assert given(kind="linear", attn_factor=1.5, yarn_attn_factor=2.0).attn_factor == 3.0
    assert given(RopeRequest(yarn_attn_factor=4.0), kind="linear", attn_factor=1.5).attn_factor == 6.0


@pytest.mark.parametrize(
    ("request_ext", "model_ext", "kind", "expected"),
    [
        (None, -1.0, "yarn", 1.0),
        (None, -1.0, "linear", 0.0),
        (None, -1.0, "longrope", 0.0),
        (None, 0.5, "linear", 0.5),
        (0.25, 0.5, "yarn", 0.25),
        (0.0, 0.5, "yarn", 0.0),
        (-1.0, 0.5, "yarn", 0.5),
    ],
)
def test_ext_factor(request_ext: float | None, model_ext: float, kind: str, expected: float) -> None:
    assert given(RopeRequest(yarn_ext_factor=request_ext), kind=kind, ext_factor=model_ext).ext_factor == expected


def test_asking_for_no_scaling_undoes_the_models() -> None:
    rope = given(RopeRequest(scaling="none", freq_scale=0.25), kind="yarn", freq_scale=0.5)
    assert (rope.freq_scale, rope.ext_factor, rope.attn_factor) == (1.0, 0.0, 1.0)


def test_original_context_is_the_callers_or_the_models_or_the_trained_one() -> None:
    assert given(n_ctx_orig=1024).n_ctx_orig == 1024
    assert given(RopeRequest(yarn_orig_ctx=512), n_ctx_orig=1024).n_ctx_orig == 512
    assert given().n_ctx_orig == 4096


@pytest.mark.parametrize(("n_ctx_seq", "is_long"), [(1024, False), (1025, True)])
def test_which_factors_is_decided_by_the_models_original_context(n_ctx_seq: int, is_long: bool) -> None:
    assert given(RopeRequest(yarn_orig_ctx=4096), n_ctx_seq, n_ctx_orig=1024).is_long is is_long


def test_frequencies_can_be_asked_for() -> None:
    request = RopeRequest(freq_base=5e5, freq_scale=0.125, yarn_beta_fast=16.0, yarn_beta_slow=2.0)
    rope = given(request, freq_scale=0.5)
    assert (rope.freq_base, rope.freq_scale, rope.beta_fast, rope.beta_slow) == (5e5, 0.125, 16.0, 2.0)
    params = rope.params(64, "neox")
    assert (params.n_dims, params.mode, params.n_ctx_orig, params.freq_base) == (64, "neox", 4096, 5e5)
    assert (params.freq_scale, params.attn_factor, params.beta_fast, params.beta_slow) == (0.125, 1.0, 16.0, 2.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": "dynamic"}, "scaling='dynamic' is unknown; known: none, linear, yarn, longrope"),
        ({"freq_base": -1.0}, r"freq_base=-1\.0"),
        ({"freq_base": math.nan}, "freq_base=nan"),
        ({"freq_base": 1e39}, r"freq_base=1e\+39 must be in 1\.\.3\.40282e\+38, or 0"),
        ({"freq_base": 0.5}, r"freq_base=0\.5"),
        ({"freq_base": 10**400}, "freq_base=1000"),
        ({"freq_scale": 1e-44}, "freq_scale=1e-44"),
        ({"freq_scale": 1e10}, r"freq_scale=10000000000\.0"),
        ({"freq_scale": "2"}, "freq_scale='2'"),
        ({"freq_scale": True}, "freq_scale=True"),
        ({"freq_scale": math.inf}, "freq_scale=inf"),
        ({"yarn_orig_ctx": -4}, "yarn_orig_ctx=-4"),
        ({"yarn_orig_ctx": 1.5}, r"yarn_orig_ctx=1\.5"),
        ({"yarn_orig_ctx": True}, "yarn_orig_ctx=True"),
        ({"yarn_ext_factor": math.nan}, "yarn_ext_factor=nan"),
        ({"yarn_attn_factor": 1e39}, r"yarn_attn_factor=1e\+39"),
        ({"yarn_beta_slow": "x"}, "yarn_beta_slow='x'"),
    ],
)
def test_requests_that_mean_nothing(fields: dict, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        RopeRequest(**fields)


def test_numbers_of_numpy_were_refused() -> None:
    request = RopeRequest(freq_base=np.float32(5e5), freq_scale=np.float64(0.5), yarn_orig_ctx=np.int64(64))
    assert request == RopeRequest(freq_base=5e5, freq_scale=0.5, yarn_orig_ctx=64)
    assert [type(value) for value in (request.freq_base, request.freq_scale, request.yarn_orig_ctx)] == [
        float,
        float,
        int,
    ]
