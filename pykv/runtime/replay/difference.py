"""Where two sides of a replay differ, looked for in the order in which a fault spreads.

Everything is compared by sequence and position, never by cell: the sides may lay their cells out differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykv.runtime.replay.side import LiveRun, Side
from pykv.runtime.replay.tolerance import Tolerance
from pykv.runtime.trace.fingerprint import N_SAMPLES, Fingerprint
from pykv.runtime.trace.step import Outcome, Step
from pykv.typing import F32Array

SMALL = 1e-2
"""A row of less than this share of the others' squared size, such as the V of a first token, may be off by as much as
one of this size."""


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Attributes
    ----------
    step : number of the step, from 1; the number of steps plus one for what shows only after all of them.
    line : of the trace; 0 = behind its end.
    did : the step in words.
    kind : "outcome", "positions", "cells", "K", "V" or "logits".
    where : what narrows it down: "seq", "layer", "pos", "row".
    first, second : what each side has.
    nmse, tolerance : of the row, where rows differ, and the most that counts as equal.
    """

    step: int
    line: int
    did: str
    kind: str
    where: Mapping[str, int]
    first: str
    second: str
    nmse: float | None = None
    tolerance: float | None = None

    @property
    def place(self) -> str:
        """What differs, in words."""
        names = {"seq": "sequence", "pos": "position"}
        return ", ".join((self.kind, *(f"{names.get(name, name)} {value}" for name, value in self.where.items())))

    def __str__(self) -> str:
        return f"{self.place}: {self.first} | {self.second}"


@dataclass(frozen=True)
class Found:
    """A difference without the step at which it showed."""

    kind: str
    where: Mapping[str, int]
    first: str
    second: str
    nmse: float | None = None
    tolerance: float | None = None

    def at(self, number: int, step: Step | None) -> Difference:
        """Return the difference, found after a step, or after all of them."""
        did, line = ("the end", 0) if step is None else (str(step), step.line)
        return Difference(number, line, did, **vars(self))


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


def differ_in_cells(first: LiveRun, second: LiveRun, seqs: Iterable[int]) -> Found | None:
    """Compare which positions the sequences hold."""
    for seq in sorted(seqs):
        one, other = first.positions(seq), second.positions(seq)
        if not np.array_equal(one, other):
            return Found("cells", {"seq": seq}, _only(one, other), _only(other, one))
    return None


def differ_in_rows(first: LiveRun, second: LiveRun, seqs: Iterable[int], tolerance: Tolerance) -> Found | None:
    """Compare K and V of the sequences, layer by layer, the first layer that differs first."""
    held = sorted(seq for seq in seqs if len(first.positions(seq)))
    for i_layer, il in enumerate(first.layers):
        most = tolerance.spread if i_layer else tolerance.stored
        for kind in ("K", "V"):
            for seq in held:
                positions, one = first.rows(kind, il, seq)
                other = second.rows(kind, il, seq)[1]
                if one.shape != other.shape:
                    return Found(kind, {"layer": il, "seq": seq}, f"shape {one.shape}", f"shape {other.shape}")
                off = row_nmse(one, other)
                bad = np.flatnonzero(off > most)
                if bad.size:
                    i = int(bad[0])
                    where = {"layer": il, "seq": seq, "pos": int(positions[i])}
                    return Found(kind, where, _row(one[i]), _row(other[i]), float(off[i]), most)
    return None


def differ_in_logits(first: LiveRun, second: Side, tolerance: Tolerance) -> Found | None:
    """Compare the logits, row by row; with a recording, what it keeps of them."""
    if isinstance(second, LiveRun):
        if first.logits is None or second.logits is None or first.logits.shape[1] != second.logits.shape[1]:
            return None
        one, other = first.logits, second.logits
        tops = [rows.argmax(axis=1).tolist() for rows in (one, other)]
    else:
        fingerprints = first.fingerprints(), second.fingerprints()
        if fingerprints[0] is None or fingerprints[1] is None:
            return None
        one, other = map(_table, fingerprints)  # type: ignore[arg-type]
        tops = [[row.top for row in side or ()] for side in fingerprints]
    if one.shape != other.shape:
        return Found("logits", {}, f"{len(one)} rows", f"{len(other)} rows")
    off = row_nmse(one, other)
    bad = np.flatnonzero(off > tolerance.spread)
    if not bad.size:
        return None
    i = int(bad[0])
    return Found("logits", {"row": i}, f"top-1 {tops[0][i]}", f"top-1 {tops[1][i]}", float(off[i]), tolerance.spread)


def row_nmse(one: F32Array, other: F32Array) -> F32Array:
    """Return the squared error of each row (n, width) over its squared size; infinite where only one is a number."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, a - b)
        error = np.square(np.where(np.isfinite(error), error, np.inf)).sum(axis=1)
        size = np.square(np.where(np.isfinite(b), b, 0.0)).sum(axis=1)
    size = np.maximum(size, SMALL * size.mean() if size.size else 0.0)
    result: F32Array = np.divide(error, size, out=np.where(error > 0, np.inf, 0.0), where=size > 0)
    return result


def _table(rows: tuple[Fingerprint, ...]) -> Any:
    return np.array([row.values for row in rows], np.float32).reshape(len(rows), 2 + N_SAMPLES)


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
