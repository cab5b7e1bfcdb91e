"""A model without weights depends on cells, positions and masks as a real one does."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support.naive_attention import NaiveKV
from support.naive_rope import naive_rope
from support.nmse import nmse
from support.stand_in import LAYER, SHAPE, SPEC, open_stand_in

import pykv
from pykv.cells import SwaType, Window
from pykv.errors import ParamError
from pykv.ggml import Arena, Buffer, DType, RopeParams, cpu_device
from pykv.memory import LayerSpec, MemorySpec
from pykv.models.spec_record import spec_factors, spec_of, spec_record
from pykv.models.stand_in import N_TOKENS, SEED, StandIn, StandInShape

EXACT = {"type_k": "f32", "type_v": "f32", "flash_attn": False}
ORDER = 1e-9
"""NMSE of sums of f32 in another order."""


class NaiveStandIn:
    """The same arithmetic in float64, one token at a time."""

    def __init__(self, shape: StandInShape) -> None:
        self.shape, self.spec = shape, spec_of(shape.spec)
        # the widest of Q, K, V, rounded up to 32, and room for the offsets of K and V
        self.width = max(h * max(one.n_embd_head_k, one.n_embd_head_v) for h, one in self._layers())
        self.width = -(-self.width // 32) * 32 + 64
        rng = np.random.default_rng(SEED)
        self.table = rng.standard_normal((N_TOKENS, self.width), np.float32).astype(np.float64)
        self.kv = [NaiveKV(one.n_embd_head_k**-0.5) for _, one in self._layers()]

    def _layers(self):
        return list(zip(self.shape.n_head_by_layer, self.spec.layers, strict=True))

    def decode(self, token: int, pos: int, seq: int = 0) -> np.ndarray:
        x = self.table[token]
        for kv, (n_head, layer) in zip(self.kv, self._layers(), strict=True):
            h = _norm(x)
            q = h[: n_head * layer.n_embd_head_k].reshape(n_head, -1)
            k = h[32 : 32 + layer.n_embd_k].reshape(layer.n_head_kv, -1)
            v = h[64 : 64 + layer.n_embd_v].reshape(layer.n_head_kv, -1)
            k = _turn(layer, k, pos)
            kv.store(seq, pos, k, k[:, : layer.n_embd_head_v] if layer.k_only else v)
            seen = kv.attend(seq, pos, _turn(layer, q, pos)).reshape(-1)
            x = x + _norm(np.concatenate([seen, np.zeros(self.width - seen.size)]))
        return self.table @ _norm(x)


def _norm(x):
    return x / np.sqrt(np.mean(x * x) + 1e-5)


def _turn(layer, heads, pos):
    rope = layer.rope
    if rope is None:
        return heads
    front, back = np.split(heads, [layer.rope_at], axis=1)
    given = {"n_dims": rope.n_dims, "mode": rope.mode, "freq_base": rope.freq_base}
    return np.concatenate([front, naive_rope(back[None], np.array([pos]), **given)[0]], axis=1)


UNEVEN = MemorySpec(
    layers=(
        LayerSpec(2, 32, 16, RopeParams(16)),
        LayerSpec(1, 32, 16, None),
        LayerSpec(4, 32, 16, RopeParams(32, "neox", freq_base=500.0)),
    )
)
LATENT = MemorySpec(
    layers=(
        LayerSpec(1, 48, 32, RopeParams(16), rope_at=32, k_only=True),
        LayerSpec(2, 48, 32, RopeParams(16, "neox"), rope_at=16),
    )
)
SHAPES = {
    "two-layers": SHAPE,
    "uneven": StandInShape((4, 3, 4), 512, spec_record(UNEVEN)),
    "latent": StandInShape((4, 4), 512, spec_record(LATENT)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_naive_forward(name):
    naive = NaiveStandIn(SHAPES[name])
    rng = np.random.default_rng(3)
    with open_stand_in(SHAPES[name], n_seq_max=2, **EXACT) as context:
        for n in (20, 1, 1, 5):
            tokens, seqs = rng.integers(0, N_TOKENS, n).tolist(), rng.integers(0, 2, n).tolist()
            starts = {s: context.memory.pos_max(s) + 1 for s in (0, 1)}
            places = [starts[s] + seqs[:i].count(s) for i, s in enumerate(seqs)]
            context.decode(pykv.Batch(tokens, seq_id=seqs, logits="all"))
            rows = [naive.decode(*one) for one in zip(tokens, places, seqs, strict=True)]
            assert nmse(context.logits, rows) < ORDER


def test_two_of_a_shape_agree_to_the_bit():
    rows = []
    for _ in range(2):
        with open_stand_in() as context:
            context.decode(pykv.Batch([3, 1, 4, 1, 5], logits="all"))
            rows.append(context.logits)
    assert np.array_equal(*rows)


@pytest.mark.parametrize("n_ubatch", [1, 3, 64])
def test_how_a_batch_is_cut_does_not_matter(n_ubatch):
    with open_stand_in(n_ubatch=n_ubatch, **EXACT) as context, open_stand_in(**EXACT) as whole:
        for one in (context, whole):
            one.decode(pykv.Batch(range(40), logits="all"))
        assert nmse(context.logits, whole.logits) < ORDER


def corrupted(which):
    with open_stand_in(**EXACT) as context:
        context.decode(pykv.Batch(range(10), logits="none"))
        tensor = context.memory.store.tensors(0)[which]
        tensor.set(-tensor.numpy())
        context.decode(pykv.Batch([11]))
        return context.logits


@pytest.mark.parametrize("which", [0, 1], ids=["K", "V"])
def test_wrong_stored_rows_show_in_the_logits(which):
    with open_stand_in(**EXACT) as context:
        context.decode(pykv.Batch([*range(10), 11]))
        assert nmse(corrupted(which), context.logits) > 1e-2


def test_layers_without_a_cache_are_left_out():
    bare = replace(LAYER, n_head_kv=0)
    spec = MemorySpec(layers=(bare, LAYER, bare, SPEC.layers[1], bare))
    with open_stand_in(StandInShape((2,) * 5, 512, spec_record(spec))) as context, open_stand_in() as plain:
        for one in (context, plain):
            one.decode(pykv.Batch([5, 6, 7]))
        assert np.array_equal(context.logits, plain.logits)


def test_spec_survives_json_with_its_rope_factors():
    arena = Arena(2)
    tensors = [arena.tensor(DType.F32, (32,), name) for name in "ab"]
    buffer = Buffer.allocate(arena, cpu_device().buffer_type, "rope factors")
    values = [np.linspace(1, 2, 32, dtype=np.float32), np.linspace(1, 8, 32, dtype=np.float32)]
    for tensor, value in zip(tensors, values, strict=True):
        buffer.adopt(tensor).set(value)
    layers = [replace(LAYER, rope_factors=tensors[i]) for i in (0, 1, 0)] + [LAYER]
    spec = MemorySpec(layers=tuple(layers), window=Window(9, SwaType.CHUNKED), logit_softcap=30.0)
    record = spec_record(spec)
    assert [one["rope_factors"] for one in record["layers"]] == [0, 1, 0, None]
    assert all(np.array_equal(*pair) for pair in zip(spec_factors(record), values, strict=True))
    assert spec_of(record, tensors) == spec
    stand_in = StandIn(StandInShape((2,) * 4, 512, record), cpu_device())
    factors = [one.rope_factors for one in stand_in.architecture.memory_spec(None).layers]
    assert [None if one is None else one.numpy().ravel().tolist() for one in factors] == [
        values[0].tolist(),
        values[1].tolist(),
        values[0].tolist(),
        None,
    ]
    stand_in.close()
    assert stand_in.closed


def test_positions_on_several_axes_survive_json():
    rope = RopeParams(64, "mrope", sections=(8, 12, 12, 0))
    spec = MemorySpec(layers=(replace(LAYER, rope=rope),))
    assert spec_of(json.loads(json.dumps(spec_record(spec)))) == spec


@pytest.mark.parametrize(
    ("heads", "change", "message"),
    [
        ((2,), {}, "names 1 layers, spec 2"),
        ((0, 2), {}, "layer 0: 1 KV heads cannot serve 0 query heads"),
        ((2, 10**9), {}, "at most 1048576"),
        (
            (2, 2),
            {"layers": [{"n_head_kv": 1}] * 2},
            "spec: layer: missing or unknown: n_embd_head_k, n_embd_head_v, rope, rope_factors",
        ),
        ((2, 2), {"window": {"n_swa": 1, "type": "ROUND"}}, "spec: window type='ROUND' must be one of NONE, STANDARD"),
        ((2, 2), {"novel": 1}, "spec: memory: missing or unknown: novel"),
        ((2, 2), {"layers": None}, "spec: layers=None must be a list"),
    ],
)
def test_shape_that_no_model_has_is_refused(heads, change, message):
    with pytest.raises(ParamError, match=message):
        StandInShape(heads, 512, dict(SHAPE.spec) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_factors": 0}, "rope_factors=0 must name one of 0 sets"),
        ({"rope": {"n_dims": 64, "sections": [16, 16]}}, r"rope sections=\[16, 16\] must be four numbers"),
        ({"rope": {"n_dims": 64, "freq_base": "much"}}, "rope freq_base='much' must be a number"),
        ({"n_embd_head_k": 0}, "n_embd_head_k=0"),
    ],
)
def test_layer_that_no_model_has_is_refused(change, message):
    layers = [SHAPE.spec["layers"][0], SHAPE.spec["layers"][1] | change]
    with pytest.raises(ParamError, match=message):
        StandInShape((2, 2), 512, dict(SHAPE.spec) | {"layers": layers})
