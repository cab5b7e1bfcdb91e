"""Latent keys that were moved, in pykv and in llama.cpp: what is decoded behind them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.nmse import nmse
from support.oracle import Oracle, OracleBatch
from support.paired import Pair
from support.tiny.deepseek2 import MODELS
from support.tiny.model import TinyFile

import pykv

pytestmark = pytest.mark.oracle

TOKENS = [int(t) for t in np.random.default_rng(6).integers(0, 256, 200)]


@pytest.mark.parametrize("name", ["deepseek2-3l", "deepseek2-3l-unabsorbed", "deepseek2-2l-wide-v3"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_what_follows_moved_keys(oracle: Oracle, write_tiny: Callable[[TinyFile], Path], name: str, dtype: str) -> None:
    """A hole is closed, and later the whole is moved on; the distances between tokens are others than they were."""
    path = write_tiny(MODELS[name])
    params = {"type_k": dtype, "type_v": dtype, "flash_attn": dtype == "f16", "n_threads": 1}
    with (
        pykv.Model.load(path) as model,
        Pair(oracle, model, path, n_ctx=512, n_ubatch=64, **params) as pair,
    ):
        pair.decode(OracleBatch.of(TOKENS[:100], logits="all"))
        pair.edit("seq_rm", 0, 20, 50)
        pair.edit("seq_add", 0, 50, -1, -30)
        pair.check_positions(1)
        for at, n in ((70, 20), (90, 1)):
            rows, expected = pair.decode(OracleBatch.of(TOKENS[100:][:n], at, logits="all"))
            assert nmse(rows, expected) <= 1e-6
        pair.edit("seq_add", 0, 0, -1, 40)
        rows, expected = pair.decode(OracleBatch.of(TOKENS[150:170], 131, logits="all"))
        assert nmse(rows, expected) <= 1e-6
