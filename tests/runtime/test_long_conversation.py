"""A conversation of many windows on a real model: its memory neither grows nor forgets what a window shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.prompts import STORY

import pykv

N_TOKENS, N_PROMPT, N_SINGLE, N_SAID = 1600, 512, 3, 16
PARAMS = {"n_ctx": 2048, "n_batch": N_PROMPT, "n_threads": 1, "n_outputs_max": 1, "attention": "fused"}


def story(model: pykv.Model) -> list[int]:
    """Return a long text that repeats itself, so that a model is sure how it goes on."""
    tokens = [token for i in range(4) for token in model.tokenizer.encode(f"Chapter {i}. {STORY}\n", add_bos=i == 0)]
    assert len(tokens) >= N_TOKENS
    return tokens[:N_TOKENS]


def hold(ctx: pykv.Context, tokens: list[int]) -> None:
    """Decode prompts, with single tokens in between; after each, hold the window cache against its size."""
    swa, nbytes, at, sizes = ctx.memory.swa, ctx.memory.nbytes, 0, [N_PROMPT, *[1] * N_SINGLE]
    while at < len(tokens):
        for size in sizes:
            ctx.decode(pykv.Batch(tokens[at : at + size], logits="last"))
            at = ctx.memory.pos_max(0) + 1
            held = swa.cells().pos[swa.cells().owners[0]]
            shown = np.arange(max(0, at - 511), at)  # with the next token, a window of 512
            assert np.isin(shown, held).all()
            assert swa.cells().n_used <= swa.n_cells
            assert ctx.memory.nbytes == nbytes
            if at >= len(tokens):
                return


def said(ctx: pykv.Context) -> list[int]:
    """Generate some tokens greedily."""
    tokens = []
    for _ in range(N_SAID):
        tokens.append(int(ctx.logits[-1].argmax()))
        ctx.decode(pykv.Batch(tokens[-1:]))
    return tokens


@pytest.mark.model
@pytest.mark.slow
def test_memory_behind_many_windows_is_constant_and_says_the_same(gemma3_path: Path) -> None:
    with pykv.Model.load(gemma3_path) as model:
        tokens, answers = story(model), []
        for swa_full in (False, True):
            with model.context(**PARAMS, swa_full=swa_full) as ctx:
                # 15 of 18 layers have a window of 512; one more ubatch of 512 has room beside it
                assert ctx.memory.swa.n_cells == (2048 if swa_full else 1024)
                assert ctx.memory.nbytes == 1024 * (3 * 2048 + 15 * ctx.memory.swa.n_cells)  # K and V of 256, f16
                hold(ctx, tokens)
                answers.append(said(ctx))
                oldest = ctx.memory.swa.pos_min(0)
                assert oldest == 0 if swa_full else oldest > N_TOKENS - 1024
        assert answers[0] == answers[1]
