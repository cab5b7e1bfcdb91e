"""A context that goes on from a snapshot says what it said the first time, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from support.tiny.registry import BY_NAME

import pykv
from pykv.runtime import Context

TOKENS = [int(t) for t in np.random.default_rng(21).integers(0, 100, 120)]
FAMILIES = ["gemma3-7l-w32", "llama4-4l", "mamba2-4l", "rwkv7-3l", "falcon-h1-3l", "lfm2-4l-w16"]


def say(ctx: Context, tokens: list[int], seq_id: int = 0) -> list[bytes]:
    """Decode token by token; returns the bytes of all logits."""
    rows = []
    for token in tokens:
        ctx.decode(pykv.Batch([token], seq_id=seq_id))
        rows.append(ctx.logits.tobytes())
    return rows


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_again(name: str, on: str, tmp_path: Path) -> None:
    path = BY_NAME[name].write(tmp_path / "tiny.gguf")
    with (
        pykv.Model.load(path, ["CPU"]) as model,
        model.context(n_ctx=256, n_seq_max=2, n_ubatch=16, n_threads=1, kv_unified=False) as ctx,
    ):
        ctx.decode(pykv.Batch(TOKENS[:50]))
        say(ctx, TOKENS[50:53])
        kept = ctx.memory.snapshot(0, on=on)
        first = say(ctx, TOKENS[53:100])
        ctx.memory.restore(0, kept)
        ctx.memory.check()
        assert ctx.memory.pos_max(0) == 52
        assert say(ctx, TOKENS[53:100]) == first
        ctx.memory.seq_cp(0, 1)
        say(ctx, TOKENS[100:110], seq_id=1)
        ctx.memory.restore(1, kept)
        assert say(ctx, TOKENS[53:100], seq_id=1) == first


def test_a_trace_ends_where_it_could_not_be_run_again(tmp_path: Path) -> None:
    path = BY_NAME["gemma3-7l-w32"].write(tmp_path / "tiny.gguf")
    with (
        pykv.Model.load(path, ["CPU"]) as model,
        model.context(n_ctx=64, n_threads=1) as ctx,
        ctx.trace(tmp_path / "trace.jsonl") as trace,
    ):
        ctx.decode(pykv.Batch(TOKENS[:9]))
        kept = ctx.memory.snapshot(0)
        kept.close()
        with pytest.raises(pykv.errors.UseAfterCloseError):
            ctx.memory.restore(0, kept)
        assert not trace.closed
        ctx.decode(pykv.Batch(TOKENS[9:10]))
        assert trace.n_steps == 2
        kept = ctx.memory.snapshot(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            ctx.memory.restore(0, kept)
        assert trace.closed
        ctx.decode(pykv.Batch(TOKENS[10:11]))
        assert trace.n_steps == 2
