"""Where two sides of a replay differ, looked for in the order in which a fault spreads.

Everything is compared by sequence and position, never by cell: the sides may lay their cells out differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pykv.runtime.replay.distance import Distances, row_nmse
from pykv.runtime.replay.side import LiveRun, Side
from pykv.runtime.trace.fingerprint import N_SAMPLES, Fingerprint
from pykv.runtime.trace.outcome import Outcome
from pykv.runtime.trace.step import DecodeStep, Step
from pykv.typing import F32Array, I32Array


@dataclass(frozen=True)
class Found:
    """Something that differs, without the step at which it showed.

    Attributes
    ----------
    kind : "outcome", "positions", "cells", "tokens", "K", "V", "R" and "S" of states, or "logits".
    where : what narrows it down: "seq", "layer", "pos", "row".
    first, second : what each side has.
    nmse, tolerance : of the row, where rows differ, and the most that counts as equal.
    """

    kind: str
    where: Mapping[str, int]
    first: str
    second: str
    nmse: float | None = None
    tolerance: float | None = None

    def at(self, number: int, step: Step | None) -> Difference:
        """Return the difference, found after a step, or after all of them."""
        did, line = ("the end", 0) if step is None else (str(step), step.line)
        return Difference(**vars(self), step=number, line=line, did=did)


@dataclass(frozen=True, kw_only=True)
class Difference(Found):
    """The first thing that differs.

    Attributes
    ----------
    step : number of the step, from 1; the number of steps plus one for what shows only after all of them.
    line : of the trace; 0 = behind its end.
    did : the step in words.
    """

    step: int
    line: int
    did: str

    @property
    def place(self) -> str:
        """What differs, in words."""
        names = {"seq": "sequence", "pos": "position"}
        return ", ".join((self.kind, *(f"{names.get(name, name)} {value}" for name, value in self.where.items())))

    def __str__(self) -> str:
        return f"{self.place}: {self.first} | {self.second}"


def differ_in_outcome(first: Outcome, second: Outcome) -> Found | None:
    """Compare what a step came to."""
    return None if first.is_like(second) else Found("outcome", {}, str(first), str(second))


def differ_in_ends(first: Side, second: Side) -> Found | None:
    """Compare the first and last positions of all sequences."""
    one, other = first.ranges(), second.ranges()
    for seq in sorted({*one, *other}):
        if one.get(seq) != other.get(seq):
            return Found("positions", {"seq": seq}, _ends(one.get(seq)), _ends(other.get(seq)))
    return None


def differ_in_held(first: LiveRun, second: Side, seqs: Iterable[int], has_tokens: bool) -> Found | None:
    """Compare which positions the sequences hold, and which tokens there."""
    one, other = first.held(seqs), second.held(seqs)
    for seq in sorted(one.keys() & other.keys()):
        a, b = one[seq], other[seq]
        if a[:2] != b[:2]:
            return Found("cells", {"seq": seq}, *_cells_in_words(first, second, seq))
        if has_tokens and a.tokens != b.tokens:
            return Found("tokens", {"seq": seq}, f"{a.n} tokens", "others at the same positions")
    return None


def differ_in_rows(first: LiveRun, second: LiveRun, seqs: Iterable[int], distances: Distances) -> Found | None:
    """Compare K and V of the sequences, layer by layer, the first layer that differs first; then their states."""
    full = sorted(seq for seq in seqs if len(first.positions(seq)))
    for place in (_Place(kind, il, seq) for il in first.layers for kind in ("K", "V") for seq in full):
        most = distances.tolerance.stored if place.layer == first.layers[0] else distances.tolerance.spread
        found = _differ_at(place, first.rows(*place), second.rows(*place), distances, most)
        if found is not None:
            return found
    return _differ_in_states(first, second, seqs, distances)


def _differ_in_states(first: LiveRun, second: LiveRun, seqs: Iterable[int], distances: Distances) -> Found | None:
    if first.stateful != second.stateful:
        return None
    full = sorted(seq for seq in seqs if first.context.memory.pos_max(seq) >= 0)
    for place in (_Place(kind, il, seq) for kind, il in first.stateful for seq in full):
        found = _differ_at(place, first.state(*place), second.state(*place), distances, distances.tolerance.spread)
        if found is not None:
            return found
    return None


class _Place(NamedTuple):
    kind: str
    layer: int
    seq: int


_Rows = tuple[I32Array, F32Array]
"""Positions (n,) and what is stored there, (n, n_embd)."""


def _differ_at(place: _Place, mine: _Rows, theirs: _Rows, distances: Distances, most: float) -> Found | None:
    (kind, il, seq), (positions, one), other = place, mine, theirs[1]
    if one.shape != other.shape:
        return Found(kind, {"layer": il, "seq": seq}, f"shape {one.shape}", f"shape {other.shape}")

    def where(i: int) -> dict[str, int]:
        return {"layer": il, "seq": seq, "pos": int(positions[i])}

    off = row_nmse(one, other)
    i = distances.first_beyond(kind, off, most, where)
    return None if i is None else Found(kind, where(i), _row(one[i]), _row(other[i]), float(off[i]), most)


def differ_in_logits(first: LiveRun, second: Side, step: DecodeStep, distances: Distances) -> Found | None:
    """Compare the logits of a step, row by row; with a recording, what it keeps of them."""
    if isinstance(second, LiveRun):
        (tops, one), (other_tops, other) = _logits(first), _logits(second)
    else:
        (tops, one), (other_tops, other) = _table(first.fingerprints()), _table(second.fingerprints())
    if one.shape != other.shape:
        return Found("logits", {}, f"{len(one)} rows", f"{len(other)} rows")
    distances.n_rows += len(tops)
    distances.n_top_differ += int(np.count_nonzero(tops != other_tops))
    off, most = row_nmse(one, other), distances.tolerance.spread
    i = distances.first_beyond("logits", off, most, step.place_of_row)
    if i is None:
        return None
    return Found("logits", step.place_of_row(i), f"top-1 {tops[i]}", f"top-1 {other_tops[i]}", float(off[i]), most)


def _logits(side: LiveRun) -> tuple[Any, F32Array]:
    assert side.logits is not None, "only what went well is compared"
    return side.logits.argmax(axis=1), side.logits


def _table(rows: Sequence[Fingerprint]) -> tuple[Any, F32Array]:
    values = np.array([row.values for row in rows], np.float32).reshape(len(rows), 2 + N_SAMPLES)
    return np.array([row.top for row in rows]), values


def _cells_in_words(first: LiveRun, second: Side, seq: int) -> tuple[str, str]:
    if isinstance(second, LiveRun):
        one, other = first.positions(seq), second.positions(seq)
        return _only(one, other), _only(other, one)
    n, n_recorded = first.held([seq])[seq].n, second.held([seq])[seq].n
    return f"{n} cells", f"{n_recorded} cells" + (", at other positions" if n == n_recorded else "")


def _ends(ends: tuple[int, int] | None) -> str:
    return "empty" if ends is None else f"{ends[0]}..{ends[1]}"


def _only(mine: F32Array | Any, other: Any) -> str:
    """Name positions that only this side holds, or holds more often."""
    values, counts = np.unique(mine, return_counts=True)
    have = dict(zip(*(a.tolist() for a in np.unique(other, return_counts=True)), strict=True))
    extra = [v for v, n in zip(values.tolist(), counts.tolist(), strict=True) if n > have.get(v, 0)]
    shown = ", ".join(map(str, extra[:8])) + (f" and {len(extra) - 8} more" if len(extra) > 8 else "")
    return f"{len(mine)} cells" + (f", alone with {shown}" if extra else "")


def _row(row: F32Array) -> str:
    return " ".join(f"{value:.4g}" for value in row[:3].tolist()) + " ..."
