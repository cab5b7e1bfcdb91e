"""At which positions a sequence may be continued: where all that the next token sees is stored.

What is asked about a position costs time and memory by the tokens that are stored, however large the position is. Many
positions are answered as (k, 2) runs of them, each from its first to its last, ascending.
Source: spec session.md section 5.1.
"""

from __future__ import annotations

import numpy as np

from pykv.cells.kv_cells import KVCells
from pykv.cells.window import Window
from pykv.typing import I64Array


def resume_points(whole: KVCells, cells: KVCells, seq_id: int, p: int, window: Window) -> I64Array:
    """Return the runs of positions up to `p`, always from 0 on, that follow a token and find all that they see.

    The tokens that can be followed are those of `whole`; what is seen are those of `cells`.
    """
    ends = np.concatenate(([0], np.unique(_stored(whole, seq_id, 0, p)) + 1))
    at, first = np.unique(_stored(cells, seq_id, 0, p)), _first_seen(window, ends)
    n_stored = np.searchsorted(at, ends) - np.searchsorted(at, first)
    return runs_of(ends[n_stored == ends - first])


def loose_resume_points(whole: KVCells, cells: KVCells, seq_id: int, p: int, window: Window) -> I64Array:
    """Return the runs as `resume_points` does, where positions may be left out and several tokens share one.

    What stands at none cannot be missed, so only what `whole` holds and `cells` has lost keeps a token from going on.
    """
    stored, n_whole = np.unique(_stored(whole, seq_id, 0, p), return_counts=True)
    kept = np.sort(_stored(cells, seq_id, 0, p))
    lost = stored[np.searchsorted(kept, stored, "right") - np.searchsorted(kept, stored) < n_whole]
    unseen_from = np.broadcast_to(np.asarray(window.hides_from(lost)), lost.shape)
    is_missed = unseen_from > lost + 1
    end = min(p, whole.pos_max(seq_id) + 1)
    first = np.concatenate(([0], unseen_from[is_missed]))
    last = np.concatenate((lost[is_missed], [end]))
    return np.stack((first, last), axis=1)[first <= last]


def missing_before(cells: KVCells, seq_id: int, p: int, window: Window) -> tuple[int, int] | None:
    """Return the first and the last position that a token at `p` would look for in vain; None if there is none."""
    first = int(_first_needed(window, np.array([p]))[0])
    runs = runs_of(np.unique(_stored(cells, seq_id, first, p)))
    if not runs.size:
        return (first, p - 1) if first < p else None
    gap_first = first if runs[0, 0] > first else int(runs[0, 1]) + 1
    gap_last = p - 1 if runs[-1, 1] < p - 1 else int(runs[-1, 0]) - 1
    return (gap_first, gap_last) if gap_first <= gap_last else None


def last_kept(whole: KVCells, windowed: KVCells, seq_id: int, p: int, window: Window) -> int:
    """Return the last position up to `p` where a sequence can end and find all of `whole` that its window shows.

    `windowed` has lost some of the cells of `whole`, and none that `whole` has not.
    """
    stored, kept = (np.sort(_stored(cells, seq_id, 0, p)) for cells in (whole, windowed))
    ends = np.concatenate(([0], stored + 1))

    def n_lost(below: I64Array) -> I64Array:
        return np.asarray(np.searchsorted(stored, below) - np.searchsorted(kept, below))

    return int(ends[n_lost(ends) == n_lost(_first_seen(window, ends))][-1])


def runs_of(at: I64Array) -> I64Array:
    """Return the runs that ascending positions, (n,) and none of them twice, form."""
    heads = np.diff(at, prepend=at[:1] - 2) != 1
    tails = np.diff(at, append=at[-1:] + 2) != 1
    return np.stack((at[heads], at[tails]), axis=1)


def common_runs(one: I64Array, other: I64Array) -> I64Array:
    """Return the runs of positions that are in runs of both."""
    first = np.maximum(one[:, None, 0], other[None, :, 0]).ravel()
    last = np.minimum(one[:, None, 1], other[None, :, 1]).ravel()
    return np.stack((first, last), axis=1)[first <= last]


def _stored(cells: KVCells, seq_id: int, p0: int, p1: int) -> I64Array:
    """Return the positions of a sequence from `p0` to below `p1`, in no order."""
    return cells.pos[cells.find(seq_id, p0, p1)].astype(np.int64)


def _first_needed(window: Window, at: I64Array) -> I64Array:
    """Return (k,) the first position that must be stored for tokens at these ones: all that they see, and the last."""
    return np.maximum(0, np.minimum(_first_seen(window, at), at - 1))


def _first_seen(window: Window, at: I64Array) -> I64Array:
    """Return (k,) the first position that tokens at these positions see."""
    return np.asarray(np.maximum(np.zeros_like(at), window.span(at)[0]))
