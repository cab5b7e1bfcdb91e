"""How far two sets of logits are apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def nmse(actual: ArrayLike, expected: ArrayLike) -> float:
    """Return the squared error divided by the squared size of what was expected, over all elements."""
    a, e = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != e.shape:
        raise AssertionError(f"shapes differ: {a.shape} and {e.shape}")
    return float(np.square(a - e).sum() / np.square(e).sum())


def clear_winner(rows: ArrayLike, tolerance: float) -> np.ndarray:
    """Tell for each row whether noise within `tolerance` (an NMSE) cannot change which logit is largest.

    The allowed error of one logit is taken as three standard deviations of the noise that such an NMSE
    means, on both of the logits at the top.
    """
    table = np.asarray(rows, dtype=np.float64)
    top = np.partition(table, -2, axis=-1)[:, -2:]
    noise = np.sqrt(tolerance * np.square(table).mean(axis=-1))
    return (top[:, 1] - top[:, 0]) > 3 * np.sqrt(2) * noise
