"""What a memory is told of a model."""

from __future__ import annotations

import math

import numpy as np
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
        ((np.True_, 64, 64), "n_head_kv="),
        ((2**31, 2**31, 32), "n_head_kv=2147483648 x n_embd_head_k=2147483648 .* at most 2147483647"),
        ((1, 64, 2**31), "n_head_kv=1 x n_embd_head_v=2147483648 .* at most 2147483647"),
        ((0, 2**63, 64), "n_embd_head_k=9223372036854775808"),
        ((1, 64, 64, 10000.0), r"rope=10000\.0 must be RopeParams"),
        ((1, 64, 64, None, [1.0]), r"rope_factors=\[1\.0\] must be a Tensor"),
        ((1, 64, 64, RopeParams(64, attn_factor=0.0)), r"would multiply keys by 0\.0, it must be positive"),
        ((1, 64, 64, RopeParams(64, attn_factor=-1.0)), r"would multiply keys by -1\.0"),
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
        ({"layers": []}, "layers"),
        ({"layers": 0}, "layers=0 must be a sequence of LayerSpec"),
        ({"layers": None}, "layers=None must be"),
        ({"layers": LayerSpec(1, 64, 64)}, "layers=LayerSpec"),
        ({"layers": (LayerSpec(1, 64, 64), 3)}, r"layers\[1\]=3 must be a LayerSpec"),
        ({"layers": "ab"}, r"layers\[0\]='a' must be a LayerSpec"),
        ({"window": None}, "window=None must be a Window"),
        ({"window": 4}, "window=4 must be a Window"),
        ({"n_pos_per_embd": True}, "n_pos_per_embd=True"),
        ({"n_pos_per_embd": None}, "n_pos_per_embd=None"),
        ({"alibi_max_bias": None}, "alibi_max_bias=None"),
        ({"alibi_max_bias": "8"}, "alibi_max_bias='8'"),
        ({"logit_softcap": True}, "logit_softcap=True"),
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


@pytest.mark.parametrize("n_layer", [0, -1, 1.5, True, "2", None, 2**40])
def test_numbers_of_layers_that_cannot_be(n_layer: object) -> None:
    with pytest.raises(ParamError, match="n_layer="):
        MemorySpec.uniform(n_layer, LayerSpec(1, 64, 64))


def test_numbers_of_numpy_were_refused() -> None:
    layer = LayerSpec(np.int64(2), np.uint32(64), np.int8(32))
    assert layer == LayerSpec(2, 64, 32)
    assert [type(n) for n in (layer.n_head_kv, layer.n_embd_head_k, layer.n_embd_head_v)] == [int] * 3
    spec = MemorySpec([layer], n_pos_per_embd=np.int64(4), alibi_max_bias=np.float32(8), logit_softcap=np.float64(30))
    assert spec == MemorySpec((LayerSpec(2, 64, 32),), n_pos_per_embd=4, alibi_max_bias=8.0, logit_softcap=30.0)
    assert hash(spec)
