"""Which cells of a state go into which streams: shared cells apart into one for each sequence, or all into one pool.

Knows neither tensors nor files: where the rows of the cells come from is said, and moving them left to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pykv.cells import Window
from pykv.state_format import CellRecords
from pykv.typing import I64Array

NO_CELLS = CellRecords(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))


class Share(NamedTuple):
    """Cells of one stream of the source.

    Attributes
    ----------
    stream : of the source.
    picked : (n,) which of its cells; None = all.
    n : how many.
    """

    stream: int
    picked: I64Array | None
    n: int


@dataclass(frozen=True, eq=False)
class Arranged:
    """One stream of the result: its cells, and from where their rows come, one after the other."""

    cells: CellRecords
    shares: tuple[Share, ...]


def into_streams(sources: Sequence[CellRecords], n_stream: int) -> list[Arranged]:
    """Return the streams of the result, each sequence in its own unless there is only one stream.

    A cell of several sequences becomes one for each. Cells of no sequence have no stream of their own, and are left
    out where there are several; so is a sequence beyond them, which the caller has refused before.

    Parameters
    ----------
    sources : the cells of each stream of the state.
    """
    if n_stream == len(sources):
        return [joined([(cells, Share(s, None, cells.n))]) for s, cells in enumerate(sources)]
    if n_stream == 1:
        return [joined([(cells, Share(s, None, cells.n)) for s, cells in enumerate(sources)])]
    return [
        joined([picked_as(i, cells, held_by(cells, seq_id), [seq_id]) for i, cells in enumerate(sources)])
        for seq_id in range(n_stream)
    ]


def held_by(cells: CellRecords, seq_id: int) -> I64Array:
    """Return which cells belong to a sequence, ascending."""
    found: I64Array = np.flatnonzero(cells.ids == seq_id)
    return cells.cell_of_id[found]


def picked_as(stream: int, cells: CellRecords, at: I64Array, ids: Sequence[int]) -> tuple[CellRecords, Share]:
    """Return some cells of a stream, (k,) `at`, each of which belongs to these sequences instead."""
    ext = None if cells.ext is None else cells.ext[at]
    own = CellRecords(
        cells.pos[at], np.full(at.size, len(ids), np.int32), np.tile(np.array(ids, np.int32), at.size), ext
    )
    return own, Share(stream, None if at.size == cells.n else at, at.size)


def joined(found: Sequence[tuple[CellRecords, Share]]) -> Arranged:
    """Return cells one after the other; their rows follow them."""
    filled = [(cells, share) for cells, share in found if cells.n]
    if not filled:
        return Arranged(NO_CELLS, ())
    if len(filled) == 1:
        return Arranged(filled[0][0], (filled[0][1],))
    ext = [cells.ext for cells, _ in filled if cells.ext is not None]
    cells = CellRecords(
        np.concatenate([cells.pos for cells, _ in filled]),
        np.concatenate([cells.n_ids for cells, _ in filled]),
        np.concatenate([cells.ids for cells, _ in filled]),
        np.concatenate(ext) if ext else None,
    )
    return Arranged(cells, tuple(share for _, share in filled))


def without_hidden(arranged: Arranged, window: Window) -> Arranged:
    """Return what the last token of each sequence sees, as a state of that sequence alone has it."""
    cells = arranged.cells
    cell = cells.cell_of_id
    last = np.full(int(cells.ids.max(initial=-1)) + 1, -1)
    np.maximum.at(last, cells.ids, cells.pos[cell])
    seen = ~window.masked(cells.pos[cell], last[cells.ids])
    n_ids = np.bincount(cell[seen], minlength=cells.n).astype(np.int32)
    left = np.flatnonzero(n_ids)
    ext = None if cells.ext is None else cells.ext[left]
    kept = CellRecords(cells.pos[left], n_ids[left], cells.ids[seen], ext)
    return Arranged(kept, tuple(_some(arranged.shares, left)))


def _some(shares: Sequence[Share], left: I64Array) -> list[Share]:
    """Return shares with the cells that are left alone, (k,) counted through all shares."""
    found, first = [], 0
    for stream, picked, n in shares:
        mine = left[np.searchsorted(left, first) : np.searchsorted(left, first + n)] - first
        found.append(Share(stream, mine if picked is None else picked[mine], mine.size))
        first += n
    return [share for share in found if share.n]
