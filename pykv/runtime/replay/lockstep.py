"""Lockstep: run each step on both sides of a replay and compare what came of it."""

from __future__ import annotations

from collections import defaultdict

from pykv.runtime.replay.difference import (
    Difference,
    Found,
    differ_in_cells,
    differ_in_ends,
    differ_in_logits,
    differ_in_outcome,
    differ_in_rows,
)
from pykv.runtime.replay.side import LiveRun, Side
from pykv.runtime.replay.tolerance import Tolerance
from pykv.runtime.trace.step import DecodeStep, Step

SHORT = 256
"""Up to this many tokens, a sequence is compared after each decode of it."""

FRESH = 1 / 32
"""Longer ones when this share of their tokens is new, so that a long trace does not read all rows after each token."""


class Lockstep:
    """Two sides, and what of theirs has not been compared yet.

    K and V are read after decodes only: reading them carries out pending moves, and moves that pile up shall do so
    here too.
    """

    def __init__(self, first: LiveRun, second: Side, tolerance: Tolerance) -> None:
        self.first, self.second, self.tolerance = first, second, tolerance
        self._all = set(range(first.context.params.n_seq_max))
        self._moved: set[int] = set()  # by verbs
        self._fresh: dict[int, dict[int, tuple[int, Step]]] = defaultdict(dict)  # sequence → position → its decode

    def do(self, number: int, step: Step) -> Difference | None:
        """Run a step and return the difference that it made."""
        if isinstance(step, DecodeStep):
            step = step.computed()
            if not step.seqs_by_token and step.outcome.error is None:
                return None  # it ended before anything was computed
        outcome = self.first.do(step)
        found = differ_in_outcome(outcome, self.second.do(step)) or differ_in_ends(self.first, self.second)
        if found is None and isinstance(self.second, LiveRun):
            touched = self._all if step.seqs is None else self._all & step.seqs
            found = differ_in_cells(self.first, self.second, touched)
            if found is None and isinstance(step, DecodeStep) and outcome.error is None:
                self._note(number, step)
                rows = self._compare(self._due(touched), number, step)
                if rows is not None:
                    return rows
            elif found is None:
                self._moved |= touched
        if found is None and isinstance(step, DecodeStep):
            found = differ_in_logits(self.first, self.second, self.tolerance)
        return None if found is None else found.at(number, step)

    def finish(self, n_steps: int) -> Difference | None:
        """Compare what is left after the last step."""
        return self._compare(self._moved | set(self._fresh), n_steps + 1, None)

    def _note(self, number: int, step: DecodeStep) -> None:
        if step.pos is None:  # recorded as refused, and taken now
            self._moved |= self._all & (step.seqs or set())
            return
        for ids, pos in zip(step.seqs_by_token, step.pos, strict=True):
            for seq in ids:
                self._fresh[seq][pos] = (number, step)

    def _due(self, touched: set[int]) -> set[int]:
        """Return which sequences to compare now."""
        ends = self.first.ranges()
        n_held = {seq: ends[seq][1] - ends[seq][0] + 1 for seq in touched if seq in ends}
        fresh = {seq for seq, n in n_held.items() if n <= SHORT or len(self._fresh[seq]) >= FRESH * n}
        return fresh | self._moved

    def _compare(self, seqs: set[int], number: int, step: Step | None) -> Difference | None:
        """Compare K and V of some sequences; what differs in a fresh row shows since the decode that wrote it."""
        if not isinstance(self.second, LiveRun):
            return None
        found: Found | None = differ_in_rows(self.first, self.second, seqs, self.tolerance)
        if found is not None:
            origin = self._fresh[found.where["seq"]].get(found.where.get("pos", -1), (number, step))
            return found.at(*origin)
        self._moved -= seqs
        for seq in seqs:
            self._fresh.pop(seq, None)
        return None
