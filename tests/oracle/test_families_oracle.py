"""Every family that pykv builds, as tiny models, in pykv and in real llama.cpp: the same batches, the same verbs.

A family takes part as soon as it stands in both registries; `-k <name>` picks its models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.nmse import nmse
from support.oracle import Oracle, OracleBatch
from support.paired import Pair
from support.recorded_logits import N_RS_SEQ
from support.tiny.model import TinyFile
from support.tiny.registry import BY_ARCH

import pykv
from pykv.models.registry import ARCHITECTURES

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-5
"""Largest NMSE of one decode. Both sides run the same kernels over the same numbers, so most rows are far nearer."""

MODELS: dict[str, TinyFile] = {
    name: model for arch, models in BY_ARCH.items() if arch in ARCHITECTURES for name, model in models.items()
}

SETTINGS = [(flash, unified) for flash in (True, False) for unified in (True, False)]

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 256, 640)]
N_CTX = 512
"""Cells of each sequence: window caches have 256, and the longest prompt here wraps round in them."""


@pytest.fixture(scope="module", params=list(MODELS))
def pair_of(
    request: pytest.FixtureRequest, oracle: Oracle, write_tiny: Callable[[TinyFile], Any]
) -> Iterator[Callable[..., Pair]]:
    """Open the two contexts of one model in some setting."""
    tiny = MODELS[request.param]
    path = write_tiny(tiny)
    fixed = {"n_ubatch": 64, "n_threads": 1, "n_rs_seq": N_RS_SEQ.get(tiny.arch, 0)}
    with pykv.Model.load(str(path)) as model:
        yield lambda **params: Pair(oracle, model, path, **({"n_ctx": N_CTX} | fixed | params))
    oracle.call("unload", str(path))


def several(unified: bool, flash: bool, n_seq_max: int = 3) -> dict[str, Any]:
    """Return the settings of a context with that many sequences."""
    return {"n_seq_max": n_seq_max, "kv_unified": unified, "flash_attn": flash, "n_ctx": N_CTX * n_seq_max}


def decode(pair: Pair, batch: OracleBatch) -> None:
    """Decode on both sides; the rows must agree, and where each sequence ends."""
    rows, expected = pair.decode(batch)
    assert nmse(rows, expected) <= TOLERANCE
    for seq_id in {seq_id for seq_ids in batch.seq_ids for seq_id in seq_ids}:
        assert pair.ours.memory.pos_max(seq_id) == pair.theirs.memory("seq_pos_max", seq_id)


def runs(*parts: tuple[int, int, Sequence[int]]) -> OracleBatch:
    """Return a batch of runs, one after the other: (sequence, first position, tokens); every row is wanted."""
    return OracleBatch(
        tokens=[token for _, _, tokens in parts for token in tokens],
        pos=[start + i for _, start, tokens in parts for i in range(len(tokens))],
        seq_ids=[(seq_id,) for seq_id, _, tokens in parts for _ in tokens],
        logits=[True] * sum(len(tokens) for _, _, tokens in parts),
    )


def shuffled(batch: OracleBatch, seed: int) -> OracleBatch:
    """Return the batch with its sequences interleaved at random, each in its own order."""
    ids = np.array([seq_ids[0] for seq_ids in batch.seq_ids])
    turns = np.random.default_rng(seed).permutation(ids)
    left = {seq_id: iter(np.flatnonzero(ids == seq_id).tolist()) for seq_id in set(ids.tolist())}
    order = [next(left[seq_id]) for seq_id in turns.tolist()]
    columns = (batch.tokens, batch.pos, batch.seq_ids, batch.logits)
    return OracleBatch(*([column[i] for i in order] for column in columns))


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "plain"])
def test_a_long_prompt_and_single_tokens_after_it(pair_of: Callable[..., Pair], flash: bool) -> None:
    """Longer than every window, over several ubatches, and longer than a window's cache."""
    with pair_of(flash_attn=flash) as pair:
        decode(pair, OracleBatch.of(TOKENS[:300], logits="all"))
        for i in range(300, 310):
            decode(pair, OracleBatch.of(TOKENS[i : i + 1], i))


def test_outputs_in_the_middle_and_none_at_all(pair_of: Callable[..., Pair]) -> None:
    with pair_of(flash_attn=True) as pair:
        decode(pair, OracleBatch.of(TOKENS[:90], logits=[i in (3, 70, 71) for i in range(90)]))
        pair.ours.decode(pykv.Batch(TOKENS[90:120], logits=np.zeros(30, dtype=bool)))
        pair.theirs.decode(OracleBatch.of(TOKENS[90:120], 90, logits="none"))
        decode(pair, OracleBatch.of(TOKENS[120:121], 120))


@pytest.mark.parametrize(("flash", "unified"), SETTINGS)
def test_sequences_in_one_batch(pair_of: Callable[..., Pair], flash: bool, unified: bool) -> None:
    """First of equal lengths, then of unequal ones, then token by token, each one after the other or interleaved."""
    with pair_of(**several(unified, flash)) as pair:
        decode(pair, runs(*((s, 0, TOKENS[40 * s :][:40]) for s in range(3))))
        unequal = ((s, 40, TOKENS[200 + 70 * s :][: 50 - 20 * s]) for s in range(3))
        decode(pair, runs(*unequal))
        ends = [90, 70, 50]
        decode(pair, shuffled(runs(*((s, ends[s], TOKENS[11 * s :][:30]) for s in range(3))), 1))
        decode(pair, shuffled(runs(*((s, ends[s] + 30, TOKENS[13 * s :][: 15 + s]) for s in range(3))), 2))
        for i in range(3):
            decode(pair, runs(*((s, ends[s] + 45 + s + i, TOKENS[17 * s + i :][:1]) for s in (2, 0, 1))))


@pytest.mark.parametrize(("flash", "unified"), SETTINGS)
def test_a_copy_and_its_source_both_go_on(pair_of: Callable[..., Pair], flash: bool, unified: bool) -> None:
    with pair_of(**several(unified, flash, 2)) as pair:
        decode(pair, OracleBatch.of(TOKENS[:100], logits="all"))
        pair.edit("seq_cp", 0, 1, -1, -1)
        decode(pair, runs((0, 100, TOKENS[100:120]), (1, 100, TOKENS[200:230])))
        for i in range(3):
            decode(pair, runs((1, 130 + i, TOKENS[i : i + 1]), (0, 120 + i, TOKENS[50 + i :][:1])))
        pair.edit("seq_rm", 0, -1, -1)
        decode(pair, OracleBatch.of(TOKENS[300:303], 133, 1, "all"))


@pytest.mark.parametrize(("flash", "unified"), SETTINGS)
def test_a_sequence_is_removed_and_begun_again(pair_of: Callable[..., Pair], flash: bool, unified: bool) -> None:
    with pair_of(**several(unified, flash, 2)) as pair:
        decode(pair, runs((0, 0, TOKENS[:80]), (1, 0, TOKENS[100:150])))
        pair.edit("seq_rm", 0, -1, -1)
        assert pair.ours.memory.pos_max(0) == -1
        decode(pair, runs((1, 50, TOKENS[150:170]), (0, 0, TOKENS[300:390])))
        for i in range(3):
            decode(pair, runs((0, 90 + i, TOKENS[i : i + 1]), (1, 70 + i, TOKENS[50 + i :][:1])))


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_a_tail_is_cut_and_decoding_goes_on(pair_of: Callable[..., Pair], unified: bool) -> None:
    """Where llama.cpp cuts; where it says no, nothing has changed and decoding goes on at the end."""
    with pair_of(**several(unified, True, 2)) as pair:
        decode(pair, runs((0, 0, TOKENS[:120]), (1, 0, TOKENS[:33])))
        pair.edit("seq_rm", 0, 117, -1)
        for _ in range(2):
            end = pair.theirs.memory("seq_pos_max", 0) + 1
            decode(pair, runs((1, pair.theirs.memory("seq_pos_max", 1) + 1, TOKENS[:2]), (0, end, TOKENS[400:420])))
            pair.edit("seq_rm", 0, end + 10, -1)
        decode(pair, OracleBatch.of(TOKENS[500:501], pair.theirs.memory("seq_pos_max", 0) + 1))
