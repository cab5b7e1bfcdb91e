"""Contexts that tests save and load: models of every kind of memory, what is said to them, and all that they hold."""

from __future__ import annotations

from typing import Any

import numpy as np

import pykv

KINDS = {
    "cells": "norm",
    "windows": "gemma3-4l-w16-every2",
    "states": "mamba2-4l",
    "states and cells": "falcon-h1-3l",
    "states and windows": "lfm2-4l-w16",
    "keys alone": "deepseek2-3l",
    "layer reuse": "gemma3n-22l-w32-f32",
}
"""A model of each, by `support.verb_setting.MODELS`."""

PARAMS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 3, "n_threads": 1, "type_k": "f32", "type_v": "f32"}
TOKENS = [5, 9, 2, 7, 7, 1, 30, 12]

REORDERED = 1e-4
"""How far logits move at most where the same rows lie in other cells: sums run over them in another order.

Measured at most 5e-5 (layer reuse, the fused kernel with AVX-512), 2e-5 with AVX2.
"""


def told(ctx: pykv.Context, tokens: list[int] = TOKENS, seq_id: int | list[int] = 0) -> pykv.Context:
    """Decode some tokens behind what a sequence holds, or each behind its own."""
    ctx.decode(pykv.Batch(tokens, seq_id=seq_id if isinstance(seq_id, list) else [seq_id] * len(tokens)))
    return ctx


def held(ctx: pykv.Context) -> tuple[str, bytes]:
    """Return all that a context holds: its cells in words, and its state."""
    return ctx.memory.dump(), bytes(ctx.state_bytes())


def next_row(ctx: pykv.Context, seq_id: int = 0, token: int = 3) -> np.ndarray:
    """Return the logits behind one more token."""
    told(ctx, [token], seq_id)
    return np.array(ctx.logits[-1])
