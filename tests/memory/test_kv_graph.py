"""Store and attend in a graph without a model, against attention in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.kv_scene import KVScene, plan_batch, run, run_layer
from support.nmse import nmse
from support.not_on import bound

from pykv.cells import SwaType, Window
from pykv.errors import ParamError
from pykv.ggml import Arena, Backend, DType, Graph, GraphInput, Sched, cpu_device
from pykv.memory import KV_TYPES, AttentionPath, KVCache, KVGraph, KVSettings, LayerSpec, MemorySpec

FLASH, GROUPED = AttentionPath.FLASH, AttentionPath.GROUPED

STORED = {"f32": bound(1e-12, 1e-6), "f16": 1e-6, "bf16": 1e-4, "q8_0": 3e-4}
STORED |= {"q5_0": 1e-2, "q5_1": 1e-2, "q4_0": 4e-2, "q4_1": 4e-2, "iq4_nl": 4e-2}
"""NMSE that rounding to each type may cause: a step of q8_0 is 1/127 of a block's largest value, of q4_0 1/8.

The fused path rounds the query too, to f16 or q8_0."""


def tolerance(path: AttentionPath, type_k: str, type_v: str) -> float:
    least = STORED["f16"] if path is FLASH else STORED["f32"]
    query = STORED["q8_0"] if type_k.startswith(("q", "iq")) else 0.0
    return max(STORED[type_k], STORED[type_v], least, query)


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


# two layers of different width: rows of transposed V are padded to the wider
TWO_WIDTHS = MemorySpec((LayerSpec(2, 64, 64), LayerSpec(1, 64, 64)))

WAYS = [
    (path, v_trans, type_k.label, type_v)
    for path in AttentionPath
    for v_trans in (False, True)
    for type_k in KV_TYPES
    for type_v in (("f16", "f32") if v_trans or path is GROUPED else ("f32", type_k.label))
    if (type_v == "f16") == (type_k.label != "f32") or type_v == type_k.label
]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize(("path", "v_trans", "type_k", "type_v"), WAYS)
def test_a_graph_of_ones_own_attends_as_numpy_does(path, v_trans, type_k, type_v, unified) -> None:
    settings = KVSettings(64, n_seq_max=2, unified=unified, type_k=type_k, type_v=type_v, v_trans=v_trans)
    with KVCache(TWO_WIDTHS, settings) as cache:
        step_all(KVScene(cache, path, n_head=4), tolerance(path, type_k, type_v))


@pytest.mark.parametrize("type_v", [t.label for t in KV_TYPES])
def test_keys_and_values_have_types_of_their_own(type_v: str) -> None:
    for type_k in ("f16", "q8_0", "q4_0"):
        settings = KVSettings(32, n_seq_max=2, type_k=type_k, type_v=type_v)
        with KVCache(TWO_WIDTHS, settings) as cache:
            step_all(KVScene(cache, FLASH, n_head=2), tolerance(FLASH, type_k, type_v))


SHAPES = {
    "head of 32, not rotated": LayerSpec(2, 32, 32),
    "head of 96": LayerSpec(1, 96, 96),
    "head of 256": LayerSpec(1, 256, 256),
    "wider keys": LayerSpec(2, 128, 64),
}


@pytest.mark.parametrize("type_k", ["f32", "q8_0"])
@pytest.mark.parametrize("layer", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("path", AttentionPath)
def test_heads_of_other_sizes(path: AttentionPath, layer: LayerSpec, type_k: str) -> None:
    for v_trans in (False, True):
        settings = KVSettings(32, n_seq_max=2, type_k=type_k, v_trans=v_trans)
        with KVCache(MemorySpec((layer,)), settings) as cache:
            step_all(KVScene(cache, path, n_head=6), tolerance(path, type_k, "f16"))


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("path", AttentionPath)
@pytest.mark.parametrize(
    "extra",
    [
        {"alibi_max_bias": 8.0},
        {"logit_softcap": 1.5},
        {"alibi_max_bias": 4.0, "logit_softcap": 2.0},
        {"window": Window(3, SwaType.STANDARD)},
        {"window": Window(2, SwaType.CHUNKED)},
        {"window": Window(3, SwaType.STANDARD), "alibi_max_bias": 8.0},
    ],
    ids=str,
)
def test_bias_cap_and_window(path: AttentionPath, extra: dict, unified: bool) -> None:
    spec = MemorySpec((LayerSpec(3, 64, 64),), **extra)
    # six query heads: no power of two, where the slopes of ALiBi come from two series
    settings = KVSettings(32, n_seq_max=2, unified=unified, type_k="f32", type_v="f32", v_trans=path is GROUPED)
    with KVCache(spec, settings) as cache:
        step_all(KVScene(cache, path, n_head=6), tolerance(path, "f32", "f32"))


@pytest.mark.parametrize("path", AttentionPath)
def test_a_token_of_two_sequences_is_seen_by_both(path: AttentionPath) -> None:
    settings = KVSettings(32, n_seq_max=2, type_k="f32", type_v="f32")
    with KVCache(MemorySpec((LayerSpec(1, 64, 64),)), settings) as cache:
        scene = KVScene(cache, path, n_head=2)
        for tokens in (run((0, 1), range(4)), [(0, 4), (1, 4)], [(1, 5), (0, 5)]):
            for ours, expected in scene.step(tokens):
                assert nmse(ours, expected) <= tolerance(path, "f32", "f32")


@pytest.mark.parametrize("path", AttentionPath)
def test_only_the_streams_of_the_ubatch_are_read(path: AttentionPath) -> None:
    """Streams 1 and 2 of four: the views start in the middle of the tensors."""
    settings = KVSettings(32, n_seq_max=4, unified=False, v_trans=path is GROUPED)
    with KVCache(TWO_WIDTHS, settings) as cache:
        scene = KVScene(cache, path, n_head=2)
        for tokens in (
            run(3, range(6)) + run(0, range(2)),
            run(1, range(3)) + run(2, range(3)),
            [(1, 3), (2, 3)],
            [(2, 4)],
        ):
            for ours, expected in scene.step(tokens):
                assert nmse(ours, expected) <= tolerance(path, "f16", "f16")


def test_window_mask_let_a_query_see_one_key_too_many() -> None:
    """At once or one by one, query p of a window of 4 sees p - 3 to p. Case A09."""
    spec = MemorySpec((LayerSpec(1, 32, 32),), window=Window(4, SwaType.STANDARD))
    settings = KVSettings(16, type_k="f32", type_v="f32")
    with KVCache(spec, settings) as whole, KVCache(spec, settings) as single:
        scene, twin = KVScene(whole, GROUPED, 1, seed=3), KVScene(single, GROUPED, 1, seed=3)
        one_by_one = [twin.step([(0, p)])[0] for p in range(10)]
        for ours, expected in one_by_one:
            assert nmse(ours, expected) <= STORED["f32"]
        ((ours, expected),) = scene.step(run(0, range(10)))
        assert nmse(ours, expected) <= STORED["f32"]
        # the values alone tell how many keys were seen: with equal scores, outputs are means of values
        flat = _means_of_positions(spec)
    np.testing.assert_allclose(flat, [np.mean(range(max(0, p - 3), p + 1)) for p in range(10)], rtol=1e-6)


def _means_of_positions(spec: MemorySpec) -> list[float]:
    """Attend with keys of zero and values that name their position."""
    with KVCache(spec, KVSettings(16, type_k="f32", type_v="f32")) as cache:
        plan = plan_batch(cache, run(0, range(10)))
        where = (plan.apply(0), plan.slots[0], plan.ubatches[0])
        zero = np.zeros((10, 1, 32), np.float32)
        values = zero + np.arange(10, dtype=np.float32)[:, None, None]
        return run_layer(cache, GROUPED, 0, where, (zero, zero, values))[:, 0, 0].tolist()


def test_a_graph_that_only_stores_has_no_mask_to_fill() -> None:
    """An input that no node reads gets no memory; binding it must not end the process."""
    with KVCache(TWO_WIDTHS, KVSettings(16, type_k="f32", type_v="f32")) as cache:
        plan = plan_batch(cache, run(0, range(2)))
        graph = Graph(Arena(32, 32))
        kv = KVGraph(graph, cache, plan.apply(0), FLASH)
        k = GraphInput(graph.arena.tensor(DType.F32, (64, 2, 2), "k"))
        kv.store(0, k.tensor, k.tensor)
        with Backend(cpu_device(), 1) as backend, Sched([backend], 32, [*cache.owners, graph.arena]) as sched:
            sched.allocate(graph)
            for one in (k, *kv.inputs):
                one.bind()
            k.array[0] = rows = np.arange(256, dtype=np.float32).reshape(2, 2, 64)
            k.commit()
            kv.fill(plan.slots[0], plan.ubatches[0])
            sched.compute(graph)
        for tensor in cache.tensors(0):
            stored = tensor.numpy()[0, 0]
            assert np.array_equal(stored[:2], rows.reshape(2, 128))
            assert not stored[2:].any()


def test_quantised_values_by_row_need_the_fused_path() -> None:
    with KVCache(TWO_WIDTHS, KVSettings(16, type_v="q8_0")) as cache:
        plan = plan_batch(cache, run(0, range(2)))
        graph = Graph(Arena(64, 64))
        kv = KVGraph(graph, cache, plan.apply(0), GROUPED)
        q = graph.arena.tensor(DType.F32, (64, 2, 2), "q")
        with pytest.raises(ParamError, match="type_v='q8_0' needs flash attention"):
            kv.attend(0, q, 1.0)
