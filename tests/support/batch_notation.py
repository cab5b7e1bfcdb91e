"""Batches written as in the specification: ``0@3`` = sequence 0 at position 3, ``!`` = an output."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pykv.batch import Batch, BatchLimits, Splitter, validate

LIMITS = BatchLimits(n_tokens_max=64, n_vocab=1000, n_seq_max=8)

_TOKEN = re.compile(r"(?:(\d+)|\{([\d,]+)\})@(-?\d+)(!?)")


def written(text: str) -> Batch:
    """Return the batch that `text` describes; token i has the id 100 + i."""
    matches = [_TOKEN.fullmatch(word) for word in text.split()]
    assert all(matches), text
    entries = [match.groups() for match in matches if match]
    return Batch(
        [100 + i for i in range(len(entries))],
        pos=[int(pos) for _, _, pos, _ in entries],
        seq_id=[tuple(map(int, (one or several).split(","))) for one, several, _, _ in entries],
        logits=[mark == "!" for *_, mark in entries],
    )


def splitter(text: str) -> Splitter:
    """Return a splitter over a batch that continues nothing."""
    return Splitter(validate(written(text), LIMITS, None))


class Stored:
    """Sequences of a memory, each given as (first, last) stored position."""

    def __init__(self, ranges: Mapping[int, tuple[int, int]] | None = None) -> None:
        self.ranges = dict(ranges or {})

    def pos_min(self, seq_id: int) -> int:
        return self.ranges.get(seq_id, (-1, -1))[0]

    def pos_max(self, seq_id: int) -> int:
        return self.ranges.get(seq_id, (-1, -1))[1]
