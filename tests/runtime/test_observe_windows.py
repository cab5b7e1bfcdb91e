"""An observed model with windows: every cache tells of its own cells, and no share lies outside a window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.tiny.gemma3 import Gemma3
from support.tiny.model import TinyFile

import pykv

TINY = Gemma3(seed=77, n_layer=4, pattern=2, n_swa=8)
FULL, WINDOWED = {1, 3}, {0, 2}
TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, 256, 300)]


@pytest.mark.parametrize("path", ["fused", "flash", "matmul"])
@pytest.mark.parametrize("unified", [True, False])
def test_shares_lie_inside_the_window(write_tiny: Callable[[TinyFile], Path], path: str, unified: bool) -> None:
    """Also after the window's cache has been written over: 300 tokens go round in its 256 cells."""
    settings = {"n_ctx": 1024, "n_seq_max": 2, "kv_unified": unified, "n_ubatch": 16, "attention": path, "n_threads": 1}
    with pykv.Model.load(write_tiny(TINY)) as model, model.context(**settings) as context:
        context.decode(pykv.Batch(TOKENS, seq_id=1))
        with context.observe() as observer:
            for p in range(300, 303):
                context.decode(pykv.Batch([TOKENS[p - 300]], seq_id=1))
                seen = {frozenset(one.mass): one for one in observer}
                assert set(seen) == {frozenset(FULL), frozenset(WINDOWED)}
                for layers, one in seen.items():
                    assert one.tokens.tolist() == [0]
                    for il in layers:
                        mass = one.mass[il]
                        shown = one.pos[mass > 0]
                        assert abs(mass.sum() - TINY.n_head) < 1e-2
                        assert one.members[1][mass > 0].all()
                        if il in WINDOWED:
                            assert sorted(shown.tolist()) == list(range(p - 7, p + 1))
                        else:
                            assert shown.min() < p - 8
                            assert shown.max() <= p
