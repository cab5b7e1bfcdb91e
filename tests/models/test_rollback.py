"""Sequences with states are taken back by a few tokens: what follows is as if these had never been there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.nmse import nmse
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME

import pykv
from pykv.runtime import Context

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 256, 400)]
N_RS_SEQ = 4
EXACT = {"n_ctx": 256, "type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1, "n_ubatch": 24}

NAMES = (
    *("mamba-4l", "mamba2-2l-8heads-2groups", "rwkv7-2l-3heads", "jamba-4l"),
    *("falcon-h1-3l", "lfm2-4l", "lfm2-4l-w16", "qwen3next-5l-wide-every2"),
)

ORDER = 1e-10
"""NMSE allowed: a matrix product over more tokens at once adds up in another order. Measured at most 4e-13; the
state of one token earlier costs 8e-3 and more, even ten tokens later."""

Write = Callable[[TinyFile], Path]


class Taken:
    """A context whose sequences are taken back, and one that never saw what is taken."""

    def __init__(self, ours: Context, plain: Context) -> None:
        self.ours, self.plain = ours, plain
        self.histories: dict[int, list[int]] = {s: [] for s in range(ours.params.n_seq_max)}

    def decode(self, **tokens: Sequence[int]) -> None:
        """Decode a run of tokens of each sequence, named s0, s1 and so on, in one batch; all rows must agree."""
        runs = {int(name[1:]): list(run) for name, run in tokens.items()}
        ids = [s for s, run in runs.items() for _ in run]
        self.ours.decode(pykv.Batch([t for run in runs.values() for t in run], seq_id=ids, logits="all"))
        rows = np.array(self.ours.logits)
        self.ours.memory.check()
        for s, run in runs.items():
            self.histories[s] += run
            self.plain.memory.clear()
            self.plain.decode(pykv.Batch(self.histories[s], logits="all"))
            off = nmse(rows[np.array(ids) == s], self.plain.logits[-len(run) :])
            assert off <= ORDER

    def back(self, seq_id: int, n: int) -> None:
        """Take a sequence back by some tokens; what is further back is no longer there."""
        end = len(self.histories[seq_id]) - n
        assert self.ours.memory.seq_rm(seq_id, end)
        del self.histories[seq_id][end:]
        self.ours.memory.check()


@pytest.fixture(scope="module", params=NAMES)
def taken_of(request: pytest.FixtureRequest, write_tiny: Write) -> Iterator[Callable[..., Taken]]:
    """Open two empty contexts of one model."""
    with pykv.Model.load(write_tiny(BY_NAME[request.param])) as model, ExitStack() as opened:
        plain = opened.enter_context(model.context(**EXACT))

        @cache
        def ours(n_seq_max: int, unified: bool) -> Context:
            settings = EXACT | {"n_ctx": EXACT["n_ctx"] * n_seq_max, "n_seq_max": n_seq_max, "kv_unified": unified}
            return opened.enter_context(model.context(n_rs_seq=N_RS_SEQ, **settings))

        def taken(n_seq_max: int = 1, unified: bool = True) -> Taken:
            ours(n_seq_max, unified).memory.clear()
            return Taken(ours(n_seq_max, unified), plain)

        yield taken


@pytest.mark.parametrize("back", range(1, N_RS_SEQ + 1))
def test_what_follows_a_rollback_is_as_without_the_tokens_taken_back(taken_of: Callable[..., Taken], back: int) -> None:
    """Over several ubatches before it, behind it, and once more; a state is kept no further back, nor twice."""
    one = taken_of()
    one.decode(s0=TOKENS[:40])
    assert not one.ours.memory.seq_rm(0, 40 - N_RS_SEQ - 1)
    one.back(0, back)
    assert not one.ours.memory.seq_rm(0, 39 - back)
    one.decode(s0=TOKENS[100:135])
    one.back(0, back)
    for i in range(2):
        one.decode(s0=TOKENS[200 + i : 201 + i])


@pytest.mark.parametrize("unified", [True, False])
def test_sequences_are_taken_back_by_different_numbers(taken_of: Callable[..., Taken], unified: bool) -> None:
    some = taken_of(4, unified)
    some.decode(**{f"s{s}": TOKENS[20 * s :][: 12 + 9 * s] for s in range(4)})
    for s, n in ((2, 4), (0, 1), (3, 3)):
        some.back(s, n)
    some.decode(**{f"s{s}": TOKENS[100 + 10 * s :][:10] for s in range(4)})
    for s in (0, 1, 3):
        some.back(s, 1 + s)
    some.decode(s3=TOKENS[150:151], s0=TOKENS[160:170], s1=TOKENS[170:173], s2=TOKENS[180:181])


@pytest.mark.parametrize("n", [2, 3, N_RS_SEQ])
def test_a_ubatch_of_fewer_tokens_than_states_are_kept(taken_of: Callable[..., Taken], n: int) -> None:
    some = taken_of(2)
    some.decode(s0=TOKENS[:30], s1=TOKENS[50:60])
    for i in range(3):
        some.decode(s0=TOKENS[100 + 7 * i :][:n], s1=TOKENS[200 + 7 * i :][:n])
        some.back(i % 2, n - 1)
    some.decode(s0=TOKENS[300:310], s1=TOKENS[320:323])
    some.back(1, 2)
    some.decode(s1=TOKENS[330:331], s0=TOKENS[340:341])


@pytest.mark.parametrize("name", NAMES)
def test_keeping_earlier_states_changes_no_bit(write_tiny: Write, name: str) -> None:
    """Each token's sums are the same, whether it is scanned with others or by itself."""
    settings = EXACT | {"n_seq_max": 2, "kv_unified": True}
    with (
        pykv.Model.load(write_tiny(BY_NAME[name])) as model,
        model.context(n_rs_seq=N_RS_SEQ, **settings) as ours,
        model.context(**settings) as plain,
    ):
        for tokens, ids in (
            (TOKENS[:20], [0] * 10 + [1] * 10),
            (TOKENS[40:46], [0, 0, 0, 1, 1, 1]),
            (TOKENS[50:51], [1]),
        ):
            for context in (ours, plain):
                context.decode(pykv.Batch(tokens, seq_id=ids, logits=[i > 0 for i in range(len(ids) - 1)] + [True]))
            assert np.array_equal(ours.logits, plain.logits)


@pytest.mark.parametrize(("name", "n_state"), [("mamba-4l", 3 * 128 + 16 * 128), ("rwkv7-3l", 2 * 128 + 64 * 128)])
def test_a_plan_counts_the_states_that_are_kept(write_tiny: Write, name: str, n_state: int) -> None:
    settings = EXACT | {"n_seq_max": 3, "n_rs_seq": 2}
    tiny = BY_NAME[name]
    with pykv.Model.load(write_tiny(tiny)) as model, model.context(**settings) as context:
        assert context.memory.nbytes == model.memory_plan(**settings).nbytes == 4 * 3 * (1 + 2) * tiny.n_layer * n_state


@pytest.mark.parametrize("name", ["mamba-4l", "rwkv7-3l", "jamba-4l"])
def test_a_graph_of_many_layers_has_room_for_what_keeps_their_states(write_tiny: Write, name: str) -> None:
    tiny = replace(BY_NAME[name], n_layer=16)  # type: ignore[call-arg]
    with pykv.Model.load(write_tiny(tiny)) as model:
        for n_rs_seq in (0, 1, 6):
            with model.context(n_rs_seq=n_rs_seq, n_seq_max=4, kv_unified=True, **EXACT) as context:
                for seqs in ((0, 1, 2), (0, 2, 3), (1, 3)):  # the last moves a state out of the way
                    tokens = TOKENS[: 8 * len(seqs)]
                    context.decode(pykv.Batch(tokens, seq_id=[s for s in seqs for _ in range(8)]))
