"""Gemma in pykv and in real llama.cpp, beyond what all families have: embeddings among text, and the largest shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nmse import nmse
from support.oracle import Oracle, OracleBatch
from support.paired import Pair
from support.tiny import gemma2, gemma3, gemma3n
from support.tiny.model import TinyFile

import pykv

pytestmark = pytest.mark.oracle

Write = Callable[[TinyFile], Path]

TOLERANCE = 1e-5
TOKENS = [int(t) for t in np.random.default_rng(12).integers(0, 256, 120)]

PARAMS: dict[str, Any] = {"n_ctx": 256, "n_ubatch": 64, "flash_attn": True, "n_threads": 1}
NARROW = {"n_embd": 32, "n_head": 4, "n_head_kv": 1, "head_dim": 16, "n_ff": 16}


def decode(pair: Pair, batch: OracleBatch) -> None:
    rows, expected = pair.decode(batch)
    assert nmse(rows, expected) <= TOLERANCE


@pytest.mark.parametrize("model", [gemma3.MODELS["gemma3-7l-w32"], gemma3n.MODELS["gemma3n-22l-w32"]])
def test_embeddings_among_text(oracle: Oracle, write_tiny: Write, model: gemma3.Gemma3 | gemma3n.Gemma3n) -> None:
    """They are not scaled, and in Gemma 3n each layer is told of the padding token's."""
    path = write_tiny(model)
    embd = np.random.default_rng(3).standard_normal((6, model.n_embd)).astype(np.float32)
    with pykv.Model.load(path) as loaded, Pair(oracle, loaded, path, **PARAMS) as pair:
        decode(pair, OracleBatch.of(TOKENS[:60], logits="all"))
        decode(pair, OracleBatch.of_embeddings(embd, [list(range(60, 66))]))
        decode(pair, OracleBatch.of(TOKENS[60:80], 66, logits="all"))
        decode(pair, OracleBatch.of(TOKENS[80:81], 86))


@pytest.mark.parametrize(
    "model",
    [gemma2.Gemma2(seed=9, n_layer=46, **NARROW), gemma3.Gemma3(seed=9, n_layer=62, **NARROW)],
    ids=["gemma2-27b", "gemma3-27b"],
)
def test_as_many_layers_as_the_largest_has(oracle: Oracle, write_tiny: Write, model: TinyFile) -> None:
    path = write_tiny(model)
    with pykv.Model.load(path) as loaded, Pair(oracle, loaded, path, **PARAMS) as pair:
        decode(pair, OracleBatch.of(TOKENS, logits="all"))
