"""What a memory is told of a model."""

from __future__ import annotations

import math

import pytest

from pykv.errors import ParamError
from pykv.ggml import RopeParams
from pykv.memory import LayerSpec, MemorySpec


def test_rows_are_as_wide_as_all_heads() -> None:
    layer = LayerSpec(3, 64, 32)
    assert (layer.n_embd_k, layer.n_embd_v) == (192, 96)
    assert layer.fits(LayerSpec(3, 64, 32, RopeParams(64)))
    assert not any(layer.fits(other) for other in (LayerSpec(2, 64, 32), LayerSpec(3, 32, 32), LayerSpec(3, 64, 64)))


def test_uniform_repeats_a_layer() -> None:
    layer = LayerSpec(1, 32, 32)
    assert MemorySpec.uniform(3, layer, logit_softcap=2.0) == MemorySpec((layer,) * 3, logit_softcap=2.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-1, 64, 64), "n_head_kv=-1"),
        ((1.5, 64, 64), r"n_head_kv=1\.5"),
        ((True, 64, 64), "n_head_kv=True"),
        ((1, 0, 64), "n_embd_head_k=0"),
        ((1, 64, "64"), "n_embd_head_v='64'"),
        ((1, 64, 64, RopeParams(66)), r"rope\.n_dims=66 is more than n_embd_head_k=64"),
    ],
)
def test_layers_that_cannot_be(fields: tuple, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        LayerSpec(*fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": ()}, "layers"),
        ({"n_pos_per_embd": 0}, "n_pos_per_embd=0"),
        ({"n_pos_per_embd": 5}, "n_pos_per_embd=5"),
        ({"alibi_max_bias": -1.0}, r"alibi_max_bias=-1\.0"),
        ({"alibi_max_bias": math.nan}, "alibi_max_bias=nan"),
        ({"logit_softcap": math.inf}, "logit_softcap=inf"),
    ],
)
def test_specs_that_cannot_be(fields: dict, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        MemorySpec(**({"layers": (LayerSpec(1, 64, 64),)} | fields))
