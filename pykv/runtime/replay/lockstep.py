"""Lockstep: run each step on both sides of a replay and compare what came of it."""

from __future__ import annotations

from collections.abc import Container

from pykv.runtime.replay.difference import (
    Difference,
    differ_in_ends,
    differ_in_held,
    differ_in_logits,
    differ_in_outcome,
)
from pykv.runtime.replay.distance import Distances
from pykv.runtime.replay.side import LiveRun, Side
from pykv.runtime.replay.stored_rows import StoredRows
from pykv.runtime.trace.step import DecodeStep, Step


class Lockstep:
    """Two sides.

    Parameters
    ----------
    left_out : what is not compared, see `left_out`.
    """

    def __init__(self, first: LiveRun, second: Side, distances: Distances, left_out: Container[str]) -> None:
        self._first, self._second, self._distances, self._left_out = first, second, distances, left_out
        self._all = set(range(first.context.params.n_seq_max))
        self._stored = StoredRows(first, second, distances) if isinstance(second, LiveRun) else None

    def do(self, number: int, step: Step) -> Difference | None:
        """Run a step and return the difference that it made."""
        self._distances.step = number
        ran = step.computed() if isinstance(step, DecodeStep) else step
        if ran is None:
            return None  # it ended before anything was computed
        touched = self._all if ran.seqs is None else self._all & ran.seqs
        outcome = self._first.do(ran)
        found = (
            differ_in_outcome(outcome, self._second.do(ran))
            or differ_in_ends(self._first, self._second)
            or differ_in_held(self._first, self._second, touched, "tokens" not in self._left_out)
        )
        if found is not None:
            return found.at(number, ran)
        if isinstance(ran, DecodeStep) and outcome.error is None:
            return self._after_decode(number, ran, touched)
        if self._stored is not None:
            self._stored.touch(touched)
        return None

    def finish(self, n_steps: int) -> Difference | None:
        """Compare what is left after the last step."""
        self._distances.step = n_steps + 1
        return None if self._stored is None else self._stored.rest(n_steps + 1)

    def _after_decode(self, number: int, step: DecodeStep, touched: set[int]) -> Difference | None:
        """Compare K and V, in which a fault shows before it does in logits, and those."""
        rows = None if self._stored is None else self._stored.after_decode(number, step, touched)
        if rows is not None or "logits" in self._left_out:
            return rows
        found = differ_in_logits(self._first, self._second, step, self._distances)
        return None if found is None else found.at(number, step)
