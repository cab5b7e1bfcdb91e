"""Sequences with states are taken back by a few tokens: what follows is as if these had never been there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.nmse import nmse
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME

import pykv
from pykv.errors import ParamError

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 256, 200)]
N_RS_SEQ = 5
EXACT = {"n_ctx": 256, "type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1, "n_ubatch": 24}

Write = Callable[[TinyFile], Path]


@pytest.mark.parametrize(
    "name", ["mamba2-2l-8heads-2groups", "lfm2-4l", "lfm2-4l-w16", "falcon-h1-3l", "qwen3next-5l-wide-every2"]
)
def test_what_follows_a_rollback_is_as_without_the_tokens_taken_back(write_tiny: Write, name: str) -> None:
    with (
        pykv.Model.load(write_tiny(BY_NAME[name])) as model,
        model.context(n_rs_seq=N_RS_SEQ, n_seq_max=2, kv_unified=True, **EXACT) as ours,
        model.context(**EXACT) as plain,
    ):
        for back in (1, 3, N_RS_SEQ):
            ours.memory.clear()
            plain.memory.clear()
            ours.decode(pykv.Batch(TOKENS[:60] + TOKENS[100:107], seq_id=[0] * 60 + [1] * 7))
            assert ours.memory.seq_rm(0, 60 - back)
            assert not ours.memory.seq_rm(0, 59 - back)
            tail = TOKENS[150:160]
            ours.decode(pykv.Batch(tail, logits=[True] * 10))
            plain.decode(pykv.Batch(TOKENS[: 60 - back]))
            plain.decode(pykv.Batch(tail, logits=[True] * 10))
            assert nmse(ours.logits, plain.logits) < 1e-9
            ours.memory.check()


@pytest.mark.parametrize(("name", "family"), [("mamba-4l", "mamba"), ("jamba-4l", "jamba"), ("rwkv7-3l", "rwkv7")])
def test_families_whose_scan_returns_its_last_state_alone_say_so(write_tiny: Write, name: str, family: str) -> None:
    with pykv.Model.load(write_tiny(BY_NAME[name])) as model:
        with pytest.raises(ParamError, match=f"n_rs_seq=1 must be 0: .* of {family} returns the last state alone"):
            model.context(n_rs_seq=1, **EXACT)
        model.context(**EXACT).close()
