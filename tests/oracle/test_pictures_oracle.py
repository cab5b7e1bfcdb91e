"""Pictures among text: embeddings at positions of three axes, in pykv and in real llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nmse import nmse
from support.oracle import Oracle, OracleBatch
from support.paired import Pair
from support.tiny import qwen2vl
from support.tiny.model import TinyFile

import pykv

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-5
TOKENS = [int(t) for t in np.random.default_rng(9).integers(0, 256, 200)]
N_ROWS, N_COLS = 2, 3


@pytest.fixture(scope="module", params=list(qwen2vl.MODELS))
def pair_of(
    request: pytest.FixtureRequest, oracle: Oracle, write_tiny: Callable[[TinyFile], Path]
) -> Iterator[Callable[..., Pair]]:
    path = write_tiny(qwen2vl.MODELS[request.param])
    with pykv.Model.load(str(path)) as model:
        yield lambda **params: Pair(oracle, model, path, **({"n_ctx": 256, "n_threads": 1} | params))
    oracle.call("unload", str(path))


def picture(n_embd: int, at: int, seed: int, seq_id: int = 0) -> OracleBatch:
    """Return the patches of a made-up picture, row by row: one time, rows and columns counted from there on."""
    rows = np.random.default_rng(seed).standard_normal((N_ROWS * N_COLS, n_embd)).astype(np.float32)
    y, x = np.divmod(np.arange(N_ROWS * N_COLS), N_COLS)
    return OracleBatch.of_embeddings(
        rows, [[at] * len(rows), (at + y).tolist(), (at + x).tolist(), [0] * len(rows)], seq_id
    )


def decode(pair: Pair, batch: OracleBatch) -> None:
    rows, expected = pair.decode(batch)
    assert nmse(rows, expected) <= TOLERANCE


def n_embd(pair: Pair) -> int:
    return pair.ours.model.hparams.n_embd


@pytest.mark.parametrize("n_ubatch", [64, 4])
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "plain"])
def test_a_picture_between_text(pair_of: Callable[..., Pair], flash: bool, n_ubatch: int) -> None:
    """Text goes on behind the longer side of the picture; ubatches of four cut the picture in two."""
    with pair_of(flash_attn=flash, n_ubatch=n_ubatch) as pair:
        decode(pair, OracleBatch.of(TOKENS[:7], logits="all"))
        decode(pair, picture(n_embd(pair), 7, seed=1))
        assert pair.ours.memory.pos_max(0) == pair.theirs.memory("seq_pos_max", 0) == 7
        decode(pair, OracleBatch.of(TOKENS[7:30], 7 + N_COLS, logits="all"))
        decode(pair, picture(n_embd(pair), 33, seed=2))
        for i in range(3):
            decode(pair, OracleBatch.of(TOKENS[30 + i : 31 + i], 33 + N_COLS + i))


def test_a_patch_does_not_see_those_behind_it(pair_of: Callable[..., Pair]) -> None:
    """The same picture with another last patch: only the last row changes, here as there."""
    with pair_of(flash_attn=False) as pair:
        decode(pair, OracleBatch.of(TOKENS[:4], logits="all"))
        one = picture(n_embd(pair), 4, seed=3)
        assert one.embd is not None
        other = OracleBatch([], one.pos, one.seq_ids, one.logits, np.vstack((one.embd[:-1], one.embd[:1])))
        found: list[list[Any]] = []
        for batch in (one, other):
            found.append(list(pair.decode(batch)))
            pair.edit("seq_rm", 0, 4, -1)
        for before, after in zip(*found, strict=True):
            assert np.array_equal(before[:-1], after[:-1])
            assert nmse(after[-1], before[-1]) > 1e-3


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_pictures_of_two_sequences(pair_of: Callable[..., Pair], unified: bool) -> None:
    """The same places in both, other patches; then a copy, and a cut behind the picture."""
    with pair_of(n_seq_max=2, kv_unified=unified, n_ctx=512) as pair:
        for seq_id in (0, 1):
            decode(pair, OracleBatch.of(TOKENS[10 * seq_id :][:6], 0, seq_id, "all"))
            decode(pair, picture(n_embd(pair), 6, 20 + seq_id, seq_id))
        for seq_id in (0, 1):
            decode(pair, OracleBatch.of(TOKENS[50 + 20 * seq_id :][:20], 6 + N_COLS, seq_id, "all"))
        pair.edit("seq_cp", 0, 1, -1, -1) if unified else pair.edit("seq_rm", 1, -1, -1)
        pair.edit("seq_rm", 0, 9, -1)
        decode(pair, OracleBatch.of(TOKENS[90:95], 9, 0, "all"))
        decode(pair, OracleBatch.of(TOKENS[95:99], 29, 1, "all"))
        pair.check_positions(2)
