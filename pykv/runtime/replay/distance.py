"""How far rows lie apart, and the farthest that were seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pykv.runtime.replay.tolerance import Tolerance
from pykv.typing import F32Array

SMALL = 1e-2
"""A row of less than this share of the others' squared size, such as the V of a first token, may be off by as much as
one of this size."""


@dataclass(frozen=True)
class Farthest:
    """Two rows of one kind that lie farther apart than all others of it.

    Attributes
    ----------
    nmse, tolerance : their distance, and the most that counts as equal there.
    where : "step", "seq", "pos", and "layer" or "row".
    """

    nmse: float
    tolerance: float
    where: Mapping[str, int]


class Distances:
    """What was measured.

    Attributes
    ----------
    step : number of the step that is being compared.
    farthest : by kind, "K", "V", "R", "S" or "logits".
    n_rows, n_top_differ : rows of logits compared, and in how many of them another token is the likeliest.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.step = 0
        self.farthest: dict[str, Farthest] = {}
        self.n_rows = self.n_top_differ = 0

    def first_beyond(
        self, kind: str, off: F32Array, most: float, where: Callable[[int], Mapping[str, int]]
    ) -> int | None:
        """Note the largest of some distances (n,) and return the first that is larger than `most`, None if none is."""
        if not off.size:
            return None
        i = int(off.argmax())
        if kind not in self.farthest or off[i] > self.farthest[kind].nmse:
            self.farthest[kind] = Farthest(float(off[i]), most, {"step": self.step, **where(i)})
        return int((off > most).argmax()) if off[i] > most else None


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
