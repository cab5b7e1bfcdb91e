"""A context and the naive forward pass, kept in step: what one is told the other is told too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.cell_state import state
from support.naive_llama import NaiveLlama
from support.nmse import nmse
from support.tiny_gguf import TinyModel

import pykv
from pykv.runtime import Context

EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1}
"""Settings under which only the order of sums is left to differ."""

ORDER = 1e-8
"""NMSE of sums of f32 in another order, and of angles in f32, whose error grows with the position.

Measured at most 3e-12 near position 60 and 8e-10 near 530; a key too many or too few costs 1e-4 and more."""

ROUNDED = 2e-5
"""NMSE with K, V and the query rounded to f16, as the fused path does; measured at most 5e-6."""

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 300, 2000)]


class Twin:
    """Decodes with both and compares.

    Parameters
    ----------
    most : NMSE allowed between the two.
    """

    def __init__(self, context: Context, tiny: TinyModel, most: float = ORDER) -> None:
        self.context, self.naive, self.most = context, NaiveLlama(tiny), most
        self._at = 0

    def take(self, n: int) -> list[int]:
        """Return tokens that have not been used yet."""
        self._at += n
        return TOKENS[self._at - n : self._at]

    def decode(
        self,
        tokens: int | Sequence[int],
        pos: Sequence[int] | None = None,
        seq_id: int | Sequence[int | Sequence[int]] = 0,
    ) -> NDArray[np.float32]:
        """Decode tokens, or that many fresh ones, with all rows wanted; returns the context's rows."""
        tokens = self.take(tokens) if isinstance(tokens, int) else tokens
        self.context.decode(pykv.Batch(tokens, pos=pos, seq_id=seq_id, logits="all"))
        expected = self.naive.decode(tokens, pos, seq_id)
        off = nmse(self.context.logits, expected)
        assert off <= self.most, f"rows differ by {off:.2e}"
        self.context.memory.check()
        return self.context.logits

    def edit(self, verb: str, *args: int) -> None:
        """Tell both memories."""
        getattr(self.context.memory, verb)(*args)
        getattr(self.naive, verb)(*args)


def snapshot(context: Context) -> tuple[dict[str, Any], list[bytes]]:
    """Return everything that the memory holds: bookkeeping, and each byte of each tensor."""
    memory = context.memory
    pairs = [memory.tensors(il) for il in range(len(memory.spec.layers))]
    return state(memory.streams), [tensor.raw_bytes().tobytes() for pair in pairs for tensor in pair]
