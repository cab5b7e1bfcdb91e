"""Llama 4 beyond its chunk of 8192 positions, against llama.cpp: what is hidden there, and the temperature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.nmse import nmse
from support.oracle import Oracle, OracleBatch
from support.paired import Pair
from support.tiny.llama4 import Llama4
from support.tiny.model import TinyFile

import pykv

pytestmark = pytest.mark.oracle

CHUNK = 8192
TOKENS = [int(t) for t in np.random.default_rng(6).integers(0, 256, CHUNK + 700)]


def test_chunks_and_temperature_of_llama4(oracle: Oracle, write_tiny: Callable[[TinyFile], Path]) -> None:
    """The window cache is smaller than the context, so that cells of the first chunk are taken again."""
    path = write_tiny(Llama4(seed=193, n_expert=2, n_layer=4))
    exact = {"type_k": "f32", "type_v": "f32", "flash_attn": False}
    with (
        pykv.Model.load(path) as model,
        Pair(oracle, model, path, n_ctx=16384, n_batch=CHUNK, n_ubatch=512, n_threads=1, **exact) as pair,
    ):
        at = 0
        for n in (CHUNK - 20, 19, 1, 1, 40, 600):
            tokens, wanted = TOKENS[at : at + n], [i >= n - 64 for i in range(n)]
            rows, expected = pair.decode(OracleBatch.of(tokens, at, logits=wanted))
            assert nmse(rows, expected) <= 1e-9, f"from position {at}"
            at += n
