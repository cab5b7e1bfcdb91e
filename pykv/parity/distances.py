"""Distances between two runs of a program, gathered step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pykv.parity.report import Distance, Flip, Place, SideReport, Verdict
from pykv.parity.tolerance import EXACT, FACTOR
from pykv.typing import F32Array

LOGITS = -1
"""Stands for the layer of logits."""

Seen = Mapping[tuple[str, int], F32Array]
"""(kind, layer) → rows (n, width) that a step made or left, in the order in which a fault spreads."""


@dataclass
class Distances:
    """What lies between a run and the reference.

    Attributes
    ----------
    farthest : (kind, layer) → the largest NMSE of a step, and the largest difference.
    found : (step, what it did, kind, layer, NMSE) of every comparison, in order.
    """

    farthest: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    found: list[tuple[int, str, str, int, float]] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    def compare(self, step: int, did: str, reference: Seen, other: Seen) -> None:
        """Compare all that a step made. What only the reference shows is left out."""
        for (kind, il), expected in reference.items():
            rows = other.get((kind, il))
            if rows is None:
                continue
            nmse, most = apart(expected, rows)
            worst = self.farthest.get((kind, il), (0.0, 0.0))
            self.farthest[kind, il] = max(worst[0], nmse), max(worst[1], most)
            self.found.append((step, did, kind, il, nmse))
            if kind == "logits":
                self._compare_logits(step, expected, rows)

    def _compare_logits(self, step: int, expected: F32Array, rows: F32Array) -> None:
        self.kl.extend(divergence(expected, rows))
        tops, others = expected.argmax(1), rows.argmax(1)
        for row in np.flatnonzero(tops != others):
            gap = float(expected[row, tops[row]] - expected[row, others[row]])
            self.flips.append(Flip(step, int(row), int(tops[row]), int(others[row]), gap))

    def report(self, name: str, attention: str, limit: float, split: Distances | None) -> SideReport:
        """Return what was found.

        Parameters
        ----------
        limit : NMSE that the types explain.
        split : what another split makes on the reference; None = this is that, and rounding whatever it is.
        """
        if split is None:
            limit = float("inf")

        def most(kind: str, il: int) -> float:
            rounding = 0.0 if split is None else split.farthest.get((kind, il), (0.0, 0.0))[0]
            return max(limit, FACTOR * rounding)

        by_layer: dict[str, dict[int, Distance]] = {}
        for (kind, il), (nmse, max_abs) in self.farthest.items():
            by_layer.setdefault(kind, {})[il] = Distance(nmse, max_abs, most(kind, il))
        beyond = (one for one in self.found if not one[4] <= most(one[2], one[3]))
        first = next((Place(step, did, kind, None if il == LOGITS else il) for step, did, kind, il, _ in beyond), None)
        return SideReport(
            name,
            attention,
            by_layer,
            len(self.kl),
            tuple(self.flips),
            float(np.mean(self.kl)) if self.kl else 0.0,
            max(self.kl, default=0.0),
            first,
            self._verdict(first),
        )

    def _verdict(self, first: Place | None) -> Verdict:
        if first is not None:
            return "differs"
        return "same" if all(nmse <= EXACT for nmse, _ in self.farthest.values()) else "rounding"


def apart(expected: F32Array, rows: F32Array) -> tuple[float, float]:
    """Return the NMSE of rows and the largest difference of two numbers; infinite where shapes or infinities differ."""
    if expected.shape != rows.shape:
        return float("inf"), float("inf")
    a, b = expected.astype(np.float64), rows.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error)
    size = np.square(np.where(np.isfinite(a), a, 0.0)).sum()
    most = float(error.max(initial=0.0))
    with np.errstate(over="ignore"):
        total = float(np.square(error).sum())
    return (total / size if size else (0.0 if total == 0 else float("inf"))), most


def divergence(expected: F32Array, rows: F32Array) -> list[float]:
    """Return the Kullback-Leibler divergence of each row's distribution from the expected one, in nats."""
    p, q = _log_softmax(expected), _log_softmax(rows)
    with np.errstate(invalid="ignore"):
        terms = np.where(p > -np.inf, np.exp(p) * (p - q), 0.0)
    kl = np.maximum(0.0, terms.sum(1))
    return [float("inf") if np.isnan(one) else float(one) for one in kl]


def _log_softmax(logits: F32Array) -> F32Array:
    x = logits.astype(np.float64)
    x = x - x.max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        result: F32Array = x - np.log(np.exp(x).sum(1, keepdims=True))
    return result
