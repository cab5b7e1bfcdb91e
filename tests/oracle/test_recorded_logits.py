"""What was recorded of llama.cpp for the default tests is what it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.nmse import nmse
from support.oracle import Oracle
from support.recorded_logits import MODELS, load, on_llama_cpp, sha256_of
from support.tiny.model import TinyFile

pytestmark = pytest.mark.oracle

ROUNDING = 3e-7
"""A float16 is off by at most 2**-11 of its size, an NMSE of 2.4e-7; the rest is for sums in another CPU's order."""


@pytest.mark.parametrize("name", list(MODELS))
def test_recording_again_gives_the_same(oracle: Oracle, write_tiny: Callable[[TinyFile], Path], name: str) -> None:
    recorded, path = load()[name], write_tiny(MODELS[name])
    assert sha256_of(path) == recorded.sha256
    now = on_llama_cpp(oracle, MODELS[name], path)
    assert now.is_cut == recorded.outcome.is_cut
    for row, kept in zip(now.rows, recorded.outcome.rows, strict=True):
        assert nmse(kept, row) <= ROUNDING
