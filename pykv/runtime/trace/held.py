"""What the sequences of a memory hold, in a few numbers: their ends, how many cells, and hashes of what is in those.

Neither depends on where the cells are, so that memories that lay them out differently can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pykv.models.stand_in import N_TOKENS
from pykv.typing import I32Array

if TYPE_CHECKING:
    from pykv.memory import Memory

Ranges = Mapping[int, tuple[int, int]]
"""Sequence → its smallest and its largest position; empty sequences are left out."""


class Held(NamedTuple):
    """What one sequence holds where a next token may look at it.

    Attributes
    ----------
    n : cells.
    positions : hash of the positions in them.
    tokens : hash of the tokens at those positions; None where it is not known or means nothing.
    """

    n: int
    positions: int
    tokens: int | None = None


def ranges(memory: Memory) -> Ranges:
    """Return the smallest and largest position of every sequence that holds something."""
    ends = {seq: (memory.pos_min(seq), memory.pos_max(seq)) for seq in range(memory.n_seq_max)}
    return {seq: (first, last) for seq, (first, last) in ends.items() if last >= 0}


def held(memory: Memory, seqs: Iterable[int] | None, has_tokens: bool) -> dict[int, Held]:
    """Return what some sequences hold, None = all; those that are empty or do not exist are left out."""
    full = ranges(memory)
    return {seq: _held(memory, seq, has_tokens) for seq in (full if seqs is None else sorted(full.keys() & seqs))}


def _held(memory: Memory, seq: int, has_tokens: bool) -> Held:
    pos, token = memory.seen(seq)
    # a stand-in, whose vocabulary is smaller, comes to the same
    return Held(len(pos), *_hashes(pos, token % N_TOKENS) if has_tokens else _hashes(pos))


def _hashes(*columns: I32Array) -> list[int]:
    """Return 32 bits for the first column and for each with those before it: the same for the same rows in any order.

    Each row is mixed well, much as splitmix64 does it, so that the sum tells sets of rows apart.
    """
    mixed, sums = np.zeros(len(columns[0]), np.uint64), []
    for column in columns:
        mixed += column.astype(np.uint64)
        mixed += np.uint64(0x9E3779B97F4A7C15)
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed *= np.uint64(factor)
            mixed ^= mixed >> np.uint64(32)
        sums.append(int(mixed.sum()) >> 32)
    return sums
