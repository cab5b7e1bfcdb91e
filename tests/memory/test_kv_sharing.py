"""Layers that read the K and V of other layers, in the same cache or in another one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.cell_state import state
from support.kv_scene import plan_batch, run, run_layer, store_positions
from support.naive_attention import NaiveKV
from support.naive_rope import naive_rope
from support.nmse import nmse

from pykv.errors import ParamError
from pykv.ggml import RopeParams
from pykv.memory import AttentionPath, KVCache, KVSettings, LayerSpec, MemorySpec, UpdateStatus

LAYER = LayerSpec(1, 64, 64)
SPEC = MemorySpec.uniform(2, LAYER)


def test_reusing_layer_reads_the_other_layers_tensors() -> None:
    with KVCache(replace(SPEC, reuse={1: 0}), KVSettings(8)) as cache:
        assert cache.tensors(1) is cache.tensors(0)
        assert cache.nbytes == 8 * 2 * 64 * 2


def test_a_layer_that_is_filtered_out_reuses_nothing() -> None:
    with (
        KVCache(replace(SPEC, reuse={1: 0}), KVSettings(8, layers=frozenset({0}))) as cache,
        pytest.raises(ParamError, match=r"il=1: this cache holds no K and V for it; it has \[0\]"),
    ):
        cache.tensors(1)


def test_a_layer_that_is_filtered_out_shares_nothing() -> None:
    with (
        KVCache(SPEC, KVSettings(8)) as base,
        KVCache(SPEC, KVSettings(8, layers=frozenset({0})), other=base, share={0: 1, 1: 1}) as cache,
    ):
        assert cache.tensors(0) == base.tensors(1)
        with pytest.raises(ParamError, match="il=1"):
            cache.tensors(1)


@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_shared_layer_attends_over_what_the_other_cache_stored(type_k: str) -> None:
    """Also where the other cache rotated its keys: one that shares all layers has none of its own to tell."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((4, 1, 64)).astype(np.float32) for _ in range(3))
    naive = NaiveKV(1 / 8)
    for p in range(4):
        naive.store(0, p, k[p], v[p])
    expected = [naive.attend(0, p, q[p]) for p in range(4)]
    settings = KVSettings(8, type_k=type_k)
    with KVCache(SPEC, settings) as base, KVCache(SPEC, settings, other=base, share={0: 1, 1: 1}) as cache:
        assert cache.nbytes == 0
        rotations = [(one.store.rot_k, one.store.rot_v) for one in (base, cache)]
        assert rotations == [(64 if type_k == "q8_0" else 0, 0)] * 2
        plan = plan_batch(base, run(0, range(4)))
        where = (plan.apply(0), plan.slots[0], plan.ubatches[0])
        run_layer(base, AttentionPath.FLASH, 1, where, (q, k, v))
        ours = run_layer(cache, AttentionPath.FLASH, 0, where, (q, k, v))
        assert nmse(ours, expected) < 3e-4


VERBS = {
    "seq_rm": (0, 1, -1),
    "seq_cp": (0, 1, -1, -1),
    "seq_keep": (1,),
    "seq_add": (0, 1, -1, 2),
    "seq_div": (0, 0, -1, 2),
    "clear": (),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_of_a_sharing_cache_leave_the_cells_alone(verb: str) -> None:
    settings = KVSettings(8, n_seq_max=2)
    with KVCache(SPEC, settings) as base, KVCache(SPEC, settings, other=base, share={0: 0}) as cache:
        store_positions(base, run(0, range(3)) + run(1, range(2)))
        before = state(base.streams)
        assert getattr(cache, verb)(*VERBS[verb]) in (None, True)
        assert state(base.streams) == before
        assert cache.pos_max(0) == base.pos_max(0) == 2
        plan = plan_batch(cache, run(0, [3]))
        plan.apply(0)
        assert state(base.streams) == before
        getattr(base, verb)(*VERBS[verb])
        assert state(base.streams) != before


@pytest.mark.parametrize(
    ("verb", "args", "named"),
    [
        ("seq_rm", (0, 1.5), "p0"),
        ("seq_rm", (-1, 0, "end"), "p1"),
        ("seq_cp", (0, 1, "a", 2), "p0"),
        ("seq_add", (0, 0, None, 1), "p1"),
        ("seq_add", (0, 0, -1, 0.5), "delta"),
        ("seq_div", (0, 0, -1, 0), "d"),
        ("seq_div", (0, 0.5, -1, 2), "p0"),
    ],
)
def test_a_sharing_cache_took_what_no_cache_takes(verb: str, args: tuple, named: str) -> None:
    settings = KVSettings(8, n_seq_max=2)
    with KVCache(SPEC, settings) as base, KVCache(SPEC, settings, other=base) as cache:
        for one in (base, cache):
            with pytest.raises(ParamError, match=f"^{named} = "):
                getattr(one, verb)(*args)


def test_update_of_a_sharing_cache_ended_the_shifts_before_the_keys_were_moved() -> None:
    """Its own layers have no rotary positions; those of the cache whose cells it shares have, and are turned."""
    turned = MemorySpec.uniform(2, LayerSpec(1, 64, 64, RopeParams(64)))
    with KVCache(turned, KVSettings(8, type_k="f32")) as base, KVCache(SPEC, KVSettings(8), other=base) as cache:
        store_positions(base, run(0, range(3)))
        keys = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
        base.tensors(0)[0].set(keys)
        base.seq_add(0, 1, -1, 2)
        assert cache.update() is UpdateStatus.SUCCESS
        assert not base.streams.has_shift
        expected = naive_rope(keys[1:3, None], np.array([2, 2]), n_dims=64)
        np.testing.assert_allclose(base.store.tensors(0)[0].numpy()[0, 0, 1:3], expected[:, 0], atol=1e-5)


def test_closing_a_sharing_cache_leaves_the_other_one_open() -> None:
    with KVCache(SPEC, KVSettings(8)) as base:
        cache = KVCache(SPEC, KVSettings(8), other=base, share={0: 0})
        assert set(cache.owners) > set(base.owners)
        cache.close()
        base.tensors(0)[0].numpy()


@pytest.mark.parametrize(
    ("settings", "share", "message"),
    [
        ({"n_cells": 16}, {}, "n_cells=16 differs from the shared cache's 8"),
        ({"n_seq_max": 2, "unified": False}, {}, "n_stream=2 differs"),
        ({"n_seq_max": 2}, {}, "n_seq_max=2 differs from the shared cache's 1"),
        ({"reference_moves": True}, {}, "reference_moves=True differs"),
        ({"type_k": "f32"}, {0: 0}, "type_k differs between layer 0 and the other cache's layer 0"),
        ({"type_v": "q8_0"}, {1: 0}, "type_v differs between layer 1"),
        ({"v_trans": True}, {0: 0}, "v_trans differs"),
        ({}, {0: 2}, "layer 0 cannot read layer 2, whose heads are different"),
        ({}, {0: 9}, "il=9: this cache holds no K and V"),
        ({}, {5: 0}, "share: 5 is no layer; there are 2"),
        ({"reuse": {1: 0}}, {1: 0}, "reuse: layer 1 cannot read layer 0 and a shared cache"),
        ({"reuse": {1: 0}}, {0: 0}, "reuse: layer 0, which layer 1 reads, has no cache of its own"),
    ],
)
def test_caches_that_do_not_fit_together(settings: dict, share: dict[int, int], message: str) -> None:
    three = MemorySpec((LAYER, LAYER, LayerSpec(2, 32, 32)))
    wanted = {"n_cells": 8} | settings
    spec = replace(SPEC, reuse=wanted.pop("reuse", {}))
    with KVCache(three, KVSettings(8)) as base, pytest.raises(ParamError, match=message):
        KVCache(spec, KVSettings(**wanted), other=base, share=share)


@pytest.mark.parametrize("extra", [{"n_pos_per_embd": 4}, {"absolute_positions": True}])
def test_a_verb_moved_the_cells_of_a_cache_that_cannot_shift(extra: dict) -> None:
    with KVCache(SPEC, KVSettings(8)) as base, pytest.raises(ParamError, match=next(iter(extra))):
        KVCache(MemorySpec((LAYER, LAYER), **extra), KVSettings(8), other=base)


def test_shared_and_own_layers_that_are_rotated_differently() -> None:
    spec = MemorySpec((LayerSpec(1, 64, 64), LayerSpec(1, 128, 128)))
    settings = KVSettings(8, type_k="q8_0", layers=frozenset({0}))
    with KVCache(spec, settings) as base, pytest.raises(ParamError, match=r"blocks of \(64, 0\).*own layers by \(128"):
        KVCache(spec, KVSettings(8, type_k="q8_0"), other=base, share={0: 0})


def test_sharing_with_nobody() -> None:
    with pytest.raises(ParamError, match="share: there is no other cache"):
        KVCache(SPEC, KVSettings(8), share={0: 0})


def test_turned_values_were_misread_by_a_cache_that_shares_some_layers() -> None:
    """Its own layers cannot be turned with those of the other one, so neither is."""
    settings = KVSettings(8)
    with KVCache(SPEC, settings) as base:
        assert base.store.can_turn_v
        with KVCache(SPEC, settings, other=base, share={0: 0}) as cache:
            for one in (base, cache):
                assert not one.store.can_turn_v
                with pytest.raises(ParamError, match="transposed=True"):
                    one.store_v(transposed=True)
    with KVCache(SPEC, settings) as base:
        base.store_v(transposed=True)
        with pytest.raises(ParamError, match="v_trans differs"):
            KVCache(SPEC, settings, other=base, share={0: 0})
        # a cache that shares only the cells has a layout of its own
        with KVCache(SPEC, settings, other=base) as cache:
            assert (base.store.v_trans, cache.store.v_trans) == (True, False)
