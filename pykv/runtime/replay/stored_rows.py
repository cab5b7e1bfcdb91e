"""StoredRows: when K and V of two live sides are compared, and which decode a row that differs comes from."""

from __future__ import annotations

from collections import defaultdict

from pykv.runtime.replay.difference import Difference, differ_in_rows
from pykv.runtime.replay.distance import Distances
from pykv.runtime.replay.side import LiveRun
from pykv.runtime.trace.step import DecodeStep, Step

SHORT = 256
"""Up to this many tokens, a sequence is compared after each decode of it."""

FRESH = 1 / 32
"""Longer ones when this share of their tokens is new, so that a long trace does not read all rows after each token."""


class StoredRows:
    """What two sides store, and what of it has not been compared yet.

    K and V are read after decodes only: reading them carries out pending moves, and moves that pile up shall do so
    here too.
    """

    def __init__(self, first: LiveRun, second: LiveRun, distances: Distances) -> None:
        self._first, self._second, self._distances = first, second, distances
        self._moved: set[int] = set()  # by verbs
        self._fresh: dict[int, dict[int, tuple[int, Step]]] = defaultdict(dict)  # sequence → position → its decode

    def touch(self, seqs: set[int]) -> None:
        """Note that a verb may have changed sequences."""
        self._moved |= seqs

    def after_decode(self, number: int, step: DecodeStep, seqs: set[int]) -> Difference | None:
        """Compare what is due after a decode of some sequences."""
        if step.pos is None:  # recorded as refused, and taken now
            self._moved |= seqs
        else:
            for ids, pos in zip(step.seqs_by_token, step.pos, strict=True):
                for seq in ids:
                    self._fresh[seq][pos] = (number, step)
        return self._compare(self._due(seqs), number, step)

    def rest(self, number: int) -> Difference | None:
        """Compare what is left after the last step."""
        return self._compare(self._moved | set(self._fresh), number, None)

    def _due(self, seqs: set[int]) -> set[int]:
        ends = self._first.ranges()
        n_held = {seq: ends[seq][1] - ends[seq][0] + 1 for seq in seqs if seq in ends}
        return self._moved | {seq for seq, n in n_held.items() if n <= SHORT or len(self._fresh[seq]) >= FRESH * n}

    def _compare(self, seqs: set[int], number: int, step: Step | None) -> Difference | None:
        """Compare some sequences; what differs in a fresh row shows since the decode that wrote it."""
        found = differ_in_rows(self._first, self._second, seqs, self._distances)
        if found is not None:
            return found.at(*self._fresh[found.where["seq"]].get(found.where.get("pos", -1), (number, step)))
        self._moved -= seqs
        for seq in seqs:
            self._fresh.pop(seq, None)
        return None
