"""Layers that store K alone: V is the front of each key, and RoPE turns what lies behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.kv_scene import KVScene, run
from support.moved_keys import NEAR, STEPS, MovedKeys, rope_factors
from support.nmse import nmse
from support.row_writer import RowWriter, draw, rotated

from pykv.errors import ParamError
from pykv.ggml import RopeParams, Tensor
from pykv.memory import KV_TYPES, AttentionPath, AttentionPlan, KVCache, KVSettings, LayerSpec, MemorySpec

FLASH, GROUPED, FUSED = AttentionPath.FLASH, AttentionPath.GROUPED, AttentionPath.FUSED

TYPES = [t.label for t in KV_TYPES]
FLOATS = ("f32", "f16", "bf16")

STORED = {"f32": 1e-6, "f16": 1e-6, "bf16": 1e-4, "q8_0": 6e-4}
"""NMSE that rounding causes, of the query too; other types round to at most 1/8 of a block's largest value."""


def latent(rank: int, n_rot: int, n_head_kv: int = 1, **rope: float | str) -> LayerSpec:
    """Return a layer with V of `rank` elements and `n_rot` rotated ones behind them."""
    return LayerSpec(n_head_kv, rank + n_rot, rank, RopeParams(n_rot, **rope), rope_at=rank, k_only=True)


def make(*layers: LayerSpec, n_cells: int = 64, dtype: str = "f16", **settings: object) -> KVCache:
    return KVCache(MemorySpec(layers), KVSettings(n_cells, type_k=dtype, type_v=dtype, **settings), n_threads=1)


# bytes


def test_a_cell_of_deepseek_v2_lite_takes_1152_bytes_a_layer() -> None:
    """512 + 64 elements of f16; K and V of its 16 heads of 192 and 128 would take 10240."""
    spec = MemorySpec.uniform(27, latent(512, 64))
    for v_trans in (False, True):
        plan = KVCache.plan(spec, KVSettings(256, v_trans=v_trans))
        assert plan.nbytes_per_layer == dict.fromkeys(range(27), 256 * 1152)
        assert plan.nbytes == 27 * 256 * 1152
    assert KVCache.plan(spec, KVSettings(256, type_k="q8_0", type_v="q8_0")).nbytes == 27 * 256 * 18 * 34


@pytest.mark.parametrize("v_trans", [False, True])
def test_nothing_but_k_is_allocated(v_trans: bool) -> None:
    with make(latent(64, 32), LayerSpec(1, 32, 32), n_seq_max=2, unified=False, v_trans=v_trans) as cache:
        (k, v), (_, other_v) = cache.tensors(0), cache.tensors(1)
        assert v is None
        assert k.ne[:3] == (96, 64, 2)
        assert other_v is not None
        assert other_v.ne[:3] == (32, 64, 2)
        assert cache.nbytes == cache.store.plan.nbytes == 2 * 64 * 2 * (96 + 32 + 32)
        cache.check()


# attention


def step_all(scene: KVScene, most: float) -> None:
    """Prompts of two sequences, cut into ubatches; then both go on, first together, then one at a time."""
    for tokens, n_ubatch in (
        (run(0, range(5)) + run(1, range(3)), 4),
        ([(1, 3), (0, 5), (1, 4)], 512),
        ([(0, 6), (1, 5)], 512),
        ([(0, 7)], 512),
    ):
        for ours, expected in scene.step(tokens, n_ubatch):
            assert nmse(ours, expected) <= most
    scene.cache.check()


SHAPES = {
    "no rotation of blocks": latent(32, 32),
    "blocks of 64": latent(128, 64),
    "blocks of 64, though 128 divide K": latent(192, 64),
    "two heads": latent(64, 64, n_head_kv=2),
    "V is all of K": LayerSpec(1, 64, 64, k_only=True),
}

WAYS = [(path, v_trans, dtype) for path in AttentionPath for v_trans in (False, True) for dtype in TYPES]
WAYS = [(path, t, dtype) for path, t, dtype in WAYS if dtype in FLOATS or not (t or path is GROUPED)]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize(("path", "v_trans", "dtype"), WAYS)
def test_v_is_the_front_of_k(path: AttentionPath, v_trans: bool, dtype: str, unified: bool) -> None:
    for layer in SHAPES.values():
        settings = {"n_seq_max": 2, "unified": unified, "v_trans": v_trans}
        with make(layer, n_cells=32, dtype=dtype, **settings) as cache:
            step_all(KVScene(cache, path, n_head=4), STORED.get(dtype, 6e-2))


@pytest.mark.parametrize("path", AttentionPath)
def test_beside_layers_that_store_v(path: AttentionPath) -> None:
    """Where V is transposed, layers that store none take no part in it."""
    for v_trans in (False, True):
        with make(latent(64, 32), LayerSpec(2, 96, 32), latent(32, 64), v_trans=v_trans, n_seq_max=2) as cache:
            step_all(KVScene(cache, path, n_head=4), STORED["f16"])


def test_v_that_is_stored_nowhere_has_no_layout() -> None:
    """A plan that wants it transposed is not followed, and nobody else can turn it."""
    plan = AttentionPlan(GROUPED, transpose_from=1)
    with make(latent(64, 32), n_seq_max=2) as cache:
        scene = KVScene(cache, FLASH, n_head=4)
        scene.step(run(0, range(20)))
        assert not cache.lay_out(plan, 1)
        assert not cache.store.v_trans
        with pytest.raises(ParamError, match="can only lie as it was made"):
            cache.store_v(transposed=True)
        assert nmse(*scene.step(run(0, [20]))[0]) <= STORED["f16"]


def test_v_is_given_where_it_is_stored_and_only_there() -> None:
    with make(latent(32, 32)) as latents, make(LayerSpec(1, 32, 32)) as plain:
        for cache, wrong in ((latents, "stores no V"), (plain, "needs V")):
            spec = cache.spec.layers[0]
            odd = LayerSpec(1, spec.n_embd_head_k, spec.n_embd_head_v, k_only=not spec.k_only)
            with pytest.raises(ParamError, match=wrong):
                _store_as(cache, odd)


def _store_as(cache: KVCache, layer: LayerSpec) -> None:
    """Store a token as if the cache's layer were another one."""
    object.__setattr__(cache.spec, "layers", (layer,))
    with RowWriter(cache) as writer:
        writer.store(run(0, [0]), draw(cache.spec, 1, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: LayerSpec(1, 32, 64, k_only=True), "n_embd_head_v=64 is no part of n_embd_head_k=32"),
        (lambda: LayerSpec(1, 96, 64, RopeParams(32), rope_at=65, k_only=True), "from rope_at=65 on is more than"),
        (
            lambda: LayerSpec(1, 96, 64, RopeParams(32), rope_at=32, k_only=True),
            "rope_at=32 would turn V, the first 64",
        ),
        (lambda: LayerSpec(1, 96, 64, RopeParams(32), k_only=True), "rope_at=0 would turn V"),
        (lambda: LayerSpec(1, 96, 64, rope_at=-1), "rope_at=-1 must be a whole number"),
        (lambda: make(latent(32, 40), dtype="q8_0"), "does not divide the head of 72"),
        (
            lambda: KVCache.plan(MemorySpec((latent(64, 32),)), KVSettings(32, type_k="q8_0")),
            "type_v='f16' differs from type_k='q8_0', but layer 0 reads V out of K",
        ),
    ],
)
def test_what_cannot_be_is_refused(made, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        made()


# reading and moving


YARN = {"n_ctx_orig": 256, "freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9}


@pytest.fixture(scope="module")
def factors() -> Iterator[Tensor]:
    with rope_factors(np.linspace(1, 8, 16).tolist()) as tensor:
        yield tensor


def layers(factors: Tensor) -> tuple[LayerSpec, ...]:
    """Return layers of one shape that turn in different ways, the last ones with V of their own."""
    turned = RopeParams(32, "neox")
    return (
        latent(128, 64),
        latent(128, 64, mode="neox", freq_base=500.0),
        latent(128, 64, **YARN),
        LayerSpec(1, 192, 128, turned, factors, rope_at=128, k_only=True),
        LayerSpec(1, 192, 128, turned, rope_at=160, k_only=True),
        LayerSpec(1, 192, 128, k_only=True),
        LayerSpec(2, 192, 128, RopeParams(64), rope_at=128),
        LayerSpec(2, 192, 128, turned, factors, rope_at=64),
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_moved_keys_equal_fresh_ones_and_v_stays(dtype: str, factors: Tensor) -> None:
    """All by one distance, then each by another; back to where they were."""
    with make(*layers(factors), dtype=dtype) as cache:
        keys = MovedKeys(cache, 40)
        before = [cache.v(il, 0) for il in range(len(cache.spec.layers))]
        keys.check(dtype)
        keys.add(0, -1, 7)
        keys.check(dtype)
        for p in range(47, 20, -3):
            keys.add(p, -1, 2)
        keys.check(dtype)
        keys.add(0, -1, -7)
        keys.check(dtype)
        for il, v in enumerate(before):
            off = np.abs(cache.v(il, 0) - v)
            if dtype in FLOATS or not cache.spec.layers[il].k_only:
                assert off.max() == 0, f"layer {il}"
            else:  # the block is rounded anew with what turned in it
                assert np.sqrt(np.square(off).mean()) <= 1.2 * STEPS[dtype], f"layer {il}"


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_keys_are_read_as_stored_and_as_before_rope(dtype: str, factors: Tensor) -> None:
    near = NEAR.get(dtype, 3 * STEPS["q8_0"])
    with make(*layers(factors), dtype=dtype) as cache, RowWriter(cache) as writer:
        raw = draw(cache.spec, 20, np.random.default_rng(1))
        assert writer.store(run(0, range(5, 25)), raw)
        for il, (layer, (k, v)) in enumerate(zip(cache.spec.layers, raw, strict=True)):
            assert np.abs(cache.k(il, 0) - rotated(layer, k, range(5, 25))).max() <= near
            assert np.abs(cache.k(il, 0, derotate=True) - k).max() <= near
            assert cache.v(il, 0).shape == v.shape
            assert np.abs(cache.v(il, 0) - v).max() <= near
            if layer.k_only:
                assert np.array_equal(cache.v(il, 0), cache.k(il, 0)[:, :, : layer.n_embd_head_v])


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_copies_across_streams_and_within(dtype: str, factors: Tensor) -> None:
    """The copy is the source to the bit; moved afterwards, it leaves the source alone."""
    for unified in (True, False):
        with make(*layers(factors), dtype=dtype, n_seq_max=2, unified=unified) as cache, RowWriter(cache) as writer:
            raw = draw(cache.spec, 20, np.random.default_rng(2))
            assert writer.store(run(0, range(20)), raw)
            cache.seq_cp(0, 1)
            cache.update()
            whole = [(cache.k(il, 0), cache.v(il, 0)) for il in range(len(cache.spec.layers))]
            for il, (k, v) in enumerate(whole):
                assert np.array_equal(cache.k(il, 1), k)
                assert np.array_equal(cache.v(il, 1), v)
            cache.seq_add(1, 10, -1, 30)
            cache.update()
            moved = np.r_[0:10, 40:50]
            for il, (layer, (k, v)) in enumerate(zip(cache.spec.layers, whole, strict=True)):
                assert np.array_equal(cache.k(il, 0), k)
                assert np.array_equal(cache.v(il, 0), v)
                off = np.abs(cache.k(il, 1) - rotated(layer, raw[il][0], moved))
                assert off.max() <= NEAR.get(dtype, 3 * STEPS["q8_0"])
            cache.check()


def test_a_forked_conversation_attends_as_numpy_does() -> None:
    """Streams of their own: what is read after the fork was copied."""
    with make(latent(64, 32), n_seq_max=2, unified=False) as cache:
        scene = KVScene(cache, FLASH, n_head=4)
        scene.step(run(0, range(10)))
        cache.seq_cp(0, 1)
        scene.naive[0].rows = [(ids | {1}, *rest) for ids, *rest in scene.naive[0].rows]
        for tokens in (run(0, [10]) + run(1, [10]), run(1, [11, 12])):
            for ours, expected in scene.step(tokens):
                assert nmse(ours, expected) <= STORED["f16"]


def test_as_many_layers_as_the_largest_models_have(factors: Tensor) -> None:
    """The graph that turns their keys has room for every node: quantised, under Hadamard's rotation, with factors."""
    layer = LayerSpec(1, 192, 128, RopeParams(32, "neox"), factors, rope_at=128, k_only=True)
    with make(*(layer,) * 61, n_cells=32, dtype="q8_0") as cache:
        keys = MovedKeys(cache, 20)
        keys.add(5, -1, 3)
        keys.check("q8_0")
