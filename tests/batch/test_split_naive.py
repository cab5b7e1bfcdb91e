"""Any batch and any mix of splits, against the rules written down one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.naive_batch import NaiveSplitter

from pykv.batch import Batch, BatchLimits, Splitter, UBatch, validate

N_SEQ = 5
# with four sections positions may leave gaps, so a token's position can be its index in any sequence
LIMITS = BatchLimits(64, 100, N_SEQ, n_pos_per_embd=4)

seqs = st.integers(0, N_SEQ - 1)
single = st.lists(seqs.map(lambda seq: frozenset([seq])), min_size=1, max_size=24)
coupled = st.lists(st.frozensets(seqs, min_size=1, max_size=3), min_size=1, max_size=16)


def valid_batch(sets: list[frozenset[int]], output: list[bool]) -> Splitter:
    n = len(sets)
    batch = Batch(range(n), range(n), [tuple(ids) for ids in sets], output)
    return Splitter(validate(batch, LIMITS, None))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(["simple", "equal", "equal", "seq", "seq", "reset"]))
    if kind == "reset":
        return kind, {}
    m = draw(st.integers(1, 9))
    if kind == "seq":
        return kind, {"m": m, "narrow": draw(st.booleans())}
    if kind == "simple":
        return kind, {"m": m}
    keep_tail = draw(st.sampled_from([0, draw(st.integers(0, m - 1))]))
    return kind, {"m": m, "sequential": draw(st.booleans()), "keep_tail": keep_tail}


def check_content(ubatch: UBatch, sets: list[frozenset[int]], output: list[bool]) -> None:
    idxs = ubatch.batch_idxs.tolist()
    assert ubatch.token is not None
    assert ubatch.token.tolist() == idxs
    assert ubatch.pos.tolist() == [idxs] * 4
    assert ubatch.seq_ids == tuple(tuple(sorted(sets[i])) for i in idxs)
    assert ubatch.seq_first.tolist() == [min(sets[i]) for i in idxs]
    assert ubatch.seq_id_unq == tuple(sorted(frozenset().union(*(sets[i] for i in idxs))))
    assert ubatch.output.tolist() == [output[i] for i in idxs]
    assert ubatch.n_tokens == ubatch.n_seqs * ubatch.n_seq_tokens


def compare(ubatch: UBatch | None, naive: tuple[list[int], int] | None) -> None:
    assert (ubatch is None) == (naive is None)
    if ubatch is not None:
        assert (ubatch.batch_idxs.tolist(), ubatch.n_seqs) == naive


@settings(max_examples=250, deadline=None)
@given(sets=st.one_of(single, coupled), plan=st.lists(cuts(), max_size=12), data=st.data())
def test_any_mix_of_splits_follows_the_rules(
    sets: list[frozenset[int]], plan: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    output = data.draw(st.lists(st.booleans(), min_size=len(sets), max_size=len(sets)))
    fast, naive = valid_batch(sets, output), NaiveSplitter(sets, output)
    for kind, args in plan:
        ubatch, expected = getattr(fast, kind)(**args), getattr(naive, kind)(**args)
        compare(ubatch, expected)
        if ubatch is not None:
            check_content(ubatch, sets, output)
        assert fast.n_used == sum(naive.used)
        assert fast.out_ids == naive.out_ids


@settings(max_examples=100, deadline=None)
@given(sets=st.one_of(single, coupled), cut=cuts())
def test_every_split_reaches_each_token_once(sets: list[frozenset[int]], cut: tuple[str, dict[str, Any]]) -> None:
    kind, args = cut
    if kind == "reset" or (args.get("sequential") and any(len(ids) > 1 for ids in sets)):
        return
    split = valid_batch(sets, [True] * len(sets))
    step: Callable[..., UBatch | None] = getattr(split, kind)
    seen: list[int] = []
    while (ubatch := step(**args)) is not None:
        assert 0 < ubatch.n_tokens <= args["m"]
        seen += ubatch.batch_idxs.tolist()
    assert sorted(seen) == list(range(len(sets)))
    assert split.out_ids == seen
    assert split.n_used == len(sets)


def test_many_sequences_of_many_lengths() -> None:
    rng = np.random.default_rng(1)
    ids = rng.permutation(np.repeat(np.arange(256), rng.integers(1, 9, 256)))
    limits = BatchLimits(len(ids), 10, 256)
    fast = Splitter(validate(Batch(np.ones(len(ids), np.int32), seq_id=ids, logits="all"), limits, None))
    naive = NaiveSplitter([frozenset([seq]) for seq in ids.tolist()], [True] * len(ids))
    for args in [{"m": 512, "sequential": False}, {"m": 100, "sequential": True, "keep_tail": 3}] * 20:
        compare(fast.equal(**args), naive.equal(**args))  # type: ignore[arg-type]
    assert fast.out_ids == naive.out_ids
