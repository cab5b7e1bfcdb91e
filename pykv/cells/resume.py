"""At which positions a sequence may be continued: where all that the next token sees is stored.

Source: spec session.md section 5.1.
"""

from __future__ import annotations

import numpy as np

from pykv.cells.kv_cells import KVCells
from pykv.cells.window import Window
from pykv.typing import BoolArray, I64Array


def resume_points(cells: KVCells, seq_id: int, p: int, window: Window) -> BoolArray:
    """Return (p + 1,) at which positions up to `p` the next token finds all that it sees; always at 0."""
    stored = np.zeros(p, np.bool_)
    stored[cells.pos[cells.find(seq_id, 0, p)]] = True
    at = np.arange(p + 1)
    # the last position before each that is not stored: what is seen must begin behind it
    gap = np.full(p + 1, -1)
    gap[1:] = np.maximum.accumulate(np.where(stored, -1, at[:-1]))
    return np.asarray(gap < _first_seen(window, at))


def missing_before(cells: KVCells, seq_id: int, p: int, window: Window) -> tuple[int, int] | None:
    """Return the first and the last position that a token at `p` would look for in vain; None if there is none."""
    first = int(_first_seen(window, np.array([p]))[0])
    stored = np.zeros(p - first, np.bool_)
    stored[cells.pos[cells.find(seq_id, first, p)] - first] = True
    gaps = np.flatnonzero(~stored) + first
    return (int(gaps[0]), int(gaps[-1])) if gaps.size else None


def kept_points(whole: KVCells, windowed: KVCells, seq_id: int, p: int, window: Window) -> BoolArray:
    """Return (p + 1,) at which a sequence can end so that the next token finds all of `whole` that its window shows.

    `windowed` has lost some of the cells of `whole`, and none that `whole` has not.
    """
    counts = [np.bincount(cells.pos[cells.find(seq_id, 0, p)], minlength=p) for cells in (whole, windowed)]
    n_lost = np.concatenate(([0], np.cumsum(counts[0] - counts[1])))  # below each position
    is_end = np.concatenate(([True], counts[0] > 0))
    return np.asarray(is_end & (n_lost == n_lost[_first_seen(window, np.arange(p + 1))]))


def _first_seen(window: Window, at: I64Array) -> I64Array:
    """Return (k,) the first position that tokens at these positions see."""
    return np.asarray(np.maximum(np.zeros_like(at), window.span(at)[0]))
