"""Runs of positions at which decoding may go on, one by one."""

from __future__ import annotations

from itertools import pairwise

from numpy.typing import NDArray


def spread(runs: NDArray, end: int) -> list[bool]:
    """Return for each position up to `end` whether a run holds it; the runs ascend, and do not touch."""
    bounds = runs.tolist()
    assert all(0 <= first <= last <= end for first, last in bounds)
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(bounds))
    return [any(first <= p <= last for first, last in bounds) for p in range(end + 1)]
