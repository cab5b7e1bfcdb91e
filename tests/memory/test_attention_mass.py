"""How much attention each cell receives, on every path, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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


@pytest.mark.parametrize("path", AttentionPath)
@pytest.mark.parametrize("last", [None, 16, 33])
@pytest.mark.parametrize("largest", [False, True], ids=["sum", "largest"])
def test_the_end_of_a_prompt_of_many_tokens(path: AttentionPath, last: int | None, largest: bool) -> None:
    """The fused path keeps weights of a few; here they are computed beside it."""
    with KVCache(SPEC, KVSettings(128, type_k="f32", type_v="f32")) as cache:
        scene = MassScene(cache, path, n_head=4)
        what = AttentionMass(last=last, largest=largest, per_kv_head=largest)
        ((ours, expected),) = scene.step(run(0, range(61)), what)
        assert np.abs(ours - expected).max() <= ROUNDED["f32"]
        if not largest:
            assert ours.sum() == pytest.approx(4 * (last or 61), rel=1e-4)


@pytest.mark.parametrize("largest", [False, True], ids=["sum", "largest"])
def test_many_rows_of_several_streams(largest: bool) -> None:
    settings = KVSettings(64, n_seq_max=2, unified=False, type_k="f32", type_v="f32")
    with KVCache(SPEC, settings) as cache:
        scene, what = MassScene(cache, AttentionPath.FUSED, n_head=6), AttentionMass(last=20, largest=largest)
        ((ours, expected),) = scene.step([(s, p) for p in range(35) for s in range(2)], what)
        assert ours.shape == (2, 1, 64)
        assert np.abs(ours - expected).max() <= ROUNDED["f32"]


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
    seqs = [(s,) for s in (0, 0, 1, 1, 0, 1, 1, 1)]
    assert AttentionMass(last=2).chosen(seqs).tolist() == [False, True, False, False, True, False, True, True]
    assert AttentionMass(last=9).chosen(seqs).all()
    assert AttentionMass().chosen(seqs).all()


def test_the_last_tokens_of_a_sequence_that_shares_them_did_not_count() -> None:
    """Sequence 1 ends with tokens that sequence 0 goes on from."""
    seqs = [(0, 1)] * 5 + [(0,)] * 3
    assert np.flatnonzero(AttentionMass(last=2).chosen(seqs)).tolist() == [3, 4, 6, 7]
    assert np.flatnonzero(AttentionMass(last=1).chosen(seqs)).tolist() == [4, 7]
    assert np.flatnonzero(AttentionMass(last=4).chosen(seqs)).tolist() == [1, 2, 3, 4, 5, 6, 7]


@given(
    st.lists(st.sets(st.integers(0, 4), min_size=1).map(lambda ids: tuple(sorted(ids))), min_size=1, max_size=30),
    st.integers(1, 12),
)
def test_a_token_counts_if_it_is_late_in_any_of_its_sequences(seqs: list[tuple[int, ...]], last: int) -> None:
    late = {i for s in range(5) for i in [i for i, ids in enumerate(seqs) if s in ids][-last:]}
    assert set(np.flatnonzero(AttentionMass(last=last).chosen(seqs)).tolist()) == late


@pytest.mark.parametrize("path", AttentionPath)
def test_shared_tokens_are_added_up_as_numpy_does(path: AttentionPath) -> None:
    shared = [((0, 1, 2), p) for p in range(7)] + run(0, range(7, 10)) + run(2, range(7, 8))
    for last in (1, 2, 3):
        with KVCache(SPEC, KVSettings(64, n_seq_max=3, type_k="f32", type_v="f32")) as cache:
            ((ours, expected),) = MassScene(cache, path, n_head=4).step(shared, AttentionMass(last=last))
            assert np.abs(ours - expected).max() <= ROUNDED["f32"] * max(1.0, expected.max())


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
