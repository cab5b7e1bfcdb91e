"""Texts whose queries, keys and values are fixed by text and position, decoded in a cache of one layer and in numpy.

Two sequences that hold the same text must answer alike, wherever their cells lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache as remembered

import numpy as np
from numpy.typing import NDArray
from support.kv_scene import plan_batch, run_layer
from support.naive_attention import NaiveKV

from pykv.memory import AttentionPath, KVCache

F32Array = NDArray[np.float32]
N_HEAD = 2


@remembered
def told(text: int, pos: int, n_embd: int) -> tuple[F32Array, F32Array, F32Array]:
    """Return q (N_HEAD, n_embd), k and v (1, n_embd) of one token; keys as they are stored."""
    rng = np.random.default_rng([text, pos])
    return tuple(rng.standard_normal((n, n_embd)).astype(np.float32) for n in (N_HEAD, 1, 1))  # type: ignore[return-value]


def answer(
    cache: KVCache,
    tokens: Iterable[tuple[int, int]],
    path: AttentionPath = AttentionPath.GROUPED,
    *,
    text: int | None = None,
    n_ubatch: int = 512,
    n_kv: int | None = None,
) -> F32Array:
    """Store tokens (sequence, position) and return what attention answers, (n, N_HEAD, n_embd), in their order.

    `text` tells what is stored, else it is the sequence's own; `n_kv` is how many cells the graph looks at.
    """
    tokens = list(tokens)
    plan = plan_batch(cache, tokens, n_ubatch)
    assert plan is not None, f"no room for {tokens}"
    n_embd, answers = cache.spec.layers[0].n_embd_head_k, {}
    for i, ubatch in enumerate(plan.ubatches):
        shape = plan.apply(i)
        whos = list(zip(ubatch.seq_first.tolist(), ubatch.pos[0].tolist(), strict=True))
        qkv = [told(s if text is None else text, p, n_embd) for s, p in whos]
        stacked = tuple(np.array([one[j] for one in qkv]) for j in range(3))
        where = (shape if n_kv is None else replace(shape, n_kv=n_kv), plan.slots[i], ubatch)
        answers.update(zip(whos, run_layer(cache, path, 0, where, stacked), strict=True))
    return np.array([answers[one] for one in tokens])


def expected(text: int, positions: Iterable[int], n_embd: int, hidden=lambda p0, p1: False) -> F32Array:
    """Return what queries at `positions` answer over all of the text up to each of them."""
    naive = NaiveKV(1 / np.sqrt(n_embd), hidden=hidden)
    positions = list(positions)
    for p in range(max(positions) + 1):
        naive.store(0, p, *told(text, p, n_embd)[1:])
    return np.array([naive.attend(0, p, told(text, p, n_embd)[0]) for p in positions], np.float32)
