"""The same model, context and batches in pykv and in real llama.cpp, side by side."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from support.oracle import F32Array, Oracle, OracleBatch

import pykv


class Pair:
    """Two contexts that were given the same parameters and see the same batches and verbs.

    Parameters
    ----------
    attention : pykv's path, where that shall not be what `flash_attn` means on both sides.
    params : what both know: n_ctx, n_batch, n_ubatch, n_seq_max, kv_unified, type_k, type_v, flash_attn,
        swa_full, n_threads.
    """

    def __init__(
        self, oracle: Oracle, model: pykv.Model, path: Path, attention: str | None = None, **params: Any
    ) -> None:
        params = {"n_threads": 2, "n_ubatch": 512, **params}
        self.theirs = oracle.context(path, **params)
        ours = params if attention is None else params | {"flash_attn": "auto", "attention": attention}
        try:
            self.ours = model.context(**ours)
        except BaseException:
            self.theirs.close()
            raise

    def decode(self, batch: OracleBatch) -> tuple[F32Array, F32Array]:
        """Decode on both sides; return pykv's rows and llama.cpp's."""
        (expected,) = self.theirs.decode(batch)
        self.ours.decode(pykv_batch(batch))
        return np.array(self.ours.logits), expected

    def clear(self) -> None:
        """Empty both memories."""
        self.theirs.memory("clear", 0)
        self.ours.memory.clear(False)

    def edit(self, verb: str, *args: int) -> None:
        """Apply a sequence verb on both sides; what it returns must agree."""
        expected = self.theirs.memory(verb, *args)
        assert getattr(self.ours.memory, verb)(*args) == expected

    def check_positions(self, n_seqs: int) -> None:
        """Compare where every sequence begins and ends."""
        for seq_id in range(n_seqs):
            ours = self.ours.memory.pos_min(seq_id), self.ours.memory.pos_max(seq_id)
            theirs = tuple(self.theirs.memory(f"seq_pos_{end}", seq_id) for end in ("min", "max"))
            assert ours == theirs, f"sequence {seq_id}"

    def close(self) -> None:
        """Free both contexts."""
        self.ours.close()
        self.theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pykv_batch(batch: OracleBatch) -> pykv.Batch:
    """Return the same batch for pykv."""
    if batch.embd is not None:
        return pykv.Batch(None, batch.pos, list(batch.seq_ids), np.asarray(batch.logits, dtype=bool), embd=batch.embd)
    return pykv.Batch(batch.tokens, batch.pos, list(batch.seq_ids), np.asarray(batch.logits, dtype=bool))
