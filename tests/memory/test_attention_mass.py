"""How much attention each cell receives, on every path, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.kv_scene import KVScene, run
from support.mass_scene import MassScene

from pykv.cells import SwaType, Window
from pykv.errors import ParamError
from pykv.memory import KV_TYPES, AttentionMass, AttentionPath, KVCache, KVSettings, LayerSpec, MemorySpec

SPEC = MemorySpec((LayerSpec(2, 64, 64),))
STEPS = (
    (run(0, range(9)) + run(1, range(6)), 6),
    ([(1, 6), (0, 9), (1, 7), (0, 10)], 512),
    ([(0, 11), (1, 8)], 512),
    ([(0, 12)], 512),
)
"""Prompts of two sequences, cut into ubatches; then both go on, first together, then one at a time."""

ROUNDED = {"f32": 2e-3, "f16": 3e-3, "bf16": 2e-2, "q8_0": 3e-2}
"""How far a share may be from that of the given keys where they are rounded as they are stored, and queries to f16."""


def step_all(scene: MassScene, what: AttentionMass, most: float) -> None:
    for tokens, n_ubatch in STEPS:
        for ours, expected in scene.step(tokens, what, n_ubatch):
            assert ours.shape == expected.shape
            assert np.abs(ours - expected).max() <= most * max(1.0, expected.max())
            if what == AttentionMass():
                n = expected.sum(axis=(1, 2)).round()
                np.testing.assert_allclose(ours.sum(axis=(1, 2)), n, rtol=1e-4)


WHATS = [
    AttentionMass(),
    AttentionMass(per_kv_head=True),
    AttentionMass(heads=(1, 4)),
    AttentionMass(heads=(5,), per_kv_head=True),
    AttentionMass(largest=True),
    AttentionMass(largest=True, per_kv_head=True, heads=(0, 3, 4)),
    AttentionMass(last=2),
    AttentionMass(last=1, largest=True, per_kv_head=True),
    AttentionMass(last=3, heads=(0, 5)),
]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("what", WHATS, ids=str)
@pytest.mark.parametrize("path", AttentionPath)
def test_each_cell_received_what_numpy_says(path: AttentionPath, what: AttentionMass, unified: bool) -> None:
    settings = KVSettings(64, n_seq_max=2, unified=unified, type_k="f32", type_v="f32")
    with KVCache(SPEC, settings) as cache:
        step_all(MassScene(cache, path, n_head=6), what, ROUNDED["f32"])


@pytest.mark.parametrize("type_k", [t.label for t in KV_TYPES])
@pytest.mark.parametrize("path", AttentionPath)
def test_keys_of_every_type(path: AttentionPath, type_k: str) -> None:
    for what in (AttentionMass(), AttentionMass(last=2)):
        with KVCache(SPEC, KVSettings(64, n_seq_max=2, type_k=type_k, type_v="f16")) as cache:
            step_all(MassScene(cache, path, n_head=4), what, ROUNDED.get(type_k, 0.4))


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
    ],
    ids=str,
)
def test_bias_cap_and_window(path: AttentionPath, extra: dict, unified: bool) -> None:
    settings = KVSettings(32, n_seq_max=2, unified=unified, type_k="f32", type_v="f32", v_trans=path.value == "matmul")
    for what in (AttentionMass(), AttentionMass(last=2, per_kv_head=True)):
        with KVCache(MemorySpec((LayerSpec(3, 64, 64),), **extra), settings) as cache:
            step_all(MassScene(cache, path, n_head=6), what, ROUNDED["f32"])


@pytest.mark.parametrize("path", [AttentionPath.FLASH, AttentionPath.GROUPED])
@pytest.mark.parametrize("last", [None, 16, 33])
def test_the_end_of_a_prompt_of_many_tokens(path: AttentionPath, last: int | None) -> None:
    with KVCache(SPEC, KVSettings(128, type_k="f32", type_v="f32")) as cache:
        scene = MassScene(cache, path, n_head=4)
        ((ours, expected),) = scene.step(run(0, range(100)), AttentionMass(last=last))
        assert np.abs(ours - expected).max() <= ROUNDED["f32"]
        assert ours.sum() == pytest.approx(4 * (last or 100), rel=1e-4)


@pytest.mark.parametrize("path", AttentionPath)
def test_what_is_observed_attends_to_the_bit_as_without(path: AttentionPath) -> None:
    settings = KVSettings(64, n_seq_max=2, type_k="q8_0")
    with KVCache(SPEC, settings) as one, KVCache(SPEC, settings) as other:
        plain, observed = KVScene(one, path, 4, seed=5), MassScene(other, path, 4, seed=5)
        for tokens, _ in STEPS:
            ((expected, _),) = plain.step(tokens)
            observed.step(tokens, AttentionMass(last=1))
            assert observed.out is not None
            assert np.array_equal(observed.out, expected)


def test_streams_differ_in_how_many_tokens_count() -> None:
    """One stream's last tokens lie in an earlier ubatch, the other's are cut in two."""
    seqs = np.array([0, 0, 1, 1, 0, 1, 1, 1], np.int32)
    assert AttentionMass(last=2).chosen(seqs).tolist() == [False, True, False, False, True, False, True, True]
    assert AttentionMass(last=9).chosen(seqs).all()
    assert AttentionMass().chosen(seqs).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": ()}, "heads = \\(\\): must name at least one"),
        ({"heads": (-1,)}, "heads = -1: must be an integer from 0"),
        ({"heads": 3}, "heads = 3: must be a sequence"),
        ({"heads": "12"}, "heads = '12': must be a sequence"),
        ({"heads": (True,)}, "heads = True: must be an integer"),
        ({"last": 0}, "last = 0: must be an integer from 1"),
        ({"last": 1.5}, "last = 1.5: must be an integer"),
        ({"largest": 1}, "largest = 1: must be True or False"),
        ({"per_kv_head": None}, "per_kv_head = None: must be True or False"),
    ],
    ids=str,
)
def test_what_to_observe_is_checked(fields: dict, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        AttentionMass(**fields)


def test_numpy_integers_and_repetitions_are_taken() -> None:
    assert AttentionMass(heads=np.array([3, 1, 3])) == AttentionMass(heads=(1, 3))


@pytest.mark.parametrize("path", AttentionPath)
def test_a_head_that_is_not_there_is_refused(path: AttentionPath) -> None:
    with (
        KVCache(SPEC, KVSettings(32)) as cache,
        pytest.raises(ParamError, match="no head 4, the layer has heads 0 to 3"),
    ):
        MassScene(cache, path, n_head=4).step([(0, 0)], AttentionMass(heads=(4,)))
