"""What a sequence holds, kept for later: its history as far as it must still be there, or copies of its cells.

Knows no tensors: rows are copied by whoever keeps the cells. Source: spec session.md section 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from pykv.cells.kv_cells import CellSnapshot, KVCells
from pykv.cells.placing import vacate
from pykv.cells.slot import find_cells
from pykv.cells.streams import CellStreams
from pykv.cells.window import NO_WINDOW, Window
from pykv.errors import NoSlotError
from pykv.typing import NO_POS, POS_INF, I32Array, I64Array

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of positions, ascending."""


@dataclass(frozen=True)
class History:
    """Which positions a sequence holds below some position, and in a few bytes, which tokens.

    Attributes
    ----------
    runs : the positions.
    digest : of positions, columns, rows and tokens, in whatever cells they are.
    """

    runs: Runs
    digest: bytes

    @classmethod
    def of(cls, cells: KVCells, seq_id: int, p: int) -> History:
        """Return the history of a sequence below `p`."""
        idxs = cells.find(seq_id, 0, p)
        columns = [a[idxs] for a in (cells.pos, cells.ext_x, cells.ext_y, cells.ext_tok)]
        pos = columns[0]
        if np.any(pos[1:] <= pos[:-1]):
            order = np.lexsort(columns[::-1])
            columns = [column[order] for column in columns]
        digest = blake2b(digest_size=16)
        for column in columns:
            digest.update(column.tobytes())
        return cls(_runs(columns[0]), digest.digest())

    def gone_from(self, now: History) -> str | None:
        """Say what of this history `now` lacks or has besides; None if they are the same."""
        if now == self:
            return None
        for runs, others, what in ((self.runs, now.runs, "lacks"), (now.runs, self.runs, "holds also")):
            first = _first_outside(runs, others)
            if first is not None:
                return f"{what} positions {first[0]} to {first[1] - 1}"
        return "holds other tokens at the same positions"


@dataclass(frozen=True)
class Search:
    """What a search in a stream starts with: tokens that are decoded once more take the cells that they took before.

    Attributes
    ----------
    head : the cell.
    n_used : how many were occupied, by what is still seen and by what is not.
    """

    head: int
    n_used: int

    @classmethod
    def of(cls, streams: CellStreams, stream: int) -> Search:
        """Return it as it is."""
        cells = streams.cells[stream]
        return cls(streams.heads[stream], cells.n_used + cells.n_gone)

    def repeat(self, streams: CellStreams, stream: int) -> None:
        """Let the next search start in the same way."""
        cells = streams.cells[stream]
        streams.heads[stream] = min(self.head, cells.n)
        cells.n_gone = max(0, self.n_used - cells.n_used)


@dataclass(frozen=True, eq=False)
class KeptCells:
    """Copies of k cells of one sequence.

    Attributes
    ----------
    idxs : (k,) where they were, ascending.
    pos : (k,) positions.
    ext : column, row and token, (k,) each.
    search : where the next search in their stream was to begin.
    """

    idxs: I64Array
    pos: I32Array
    ext: tuple[I32Array, I32Array, I32Array]
    search: Search

    @classmethod
    def of(cls, streams: CellStreams, seq_id: int, p0: int) -> KeptCells:
        """Copy the cells of a sequence from position `p0` on."""
        stream = streams.stream_of(seq_id)
        cells = streams.cells[stream]
        idxs = cells.find(seq_id, max(0, p0), POS_INF)
        snap = cells.snapshot(idxs)
        return cls(idxs, snap.pos, snap.ext, Search.of(streams, stream))

    def put_into(self, streams: CellStreams, seq_id: int) -> I64Array:
        """Let a sequence hold these cells and no others. Mutates the bookkeeping.

        Returns
        -------
        (k,) the cells that they are in now: where they were if those are free, so that sums over cells come out the
        same to the bit, else free ones, else ones that hold what a window hides.

        Raises
        ------
        NoSlotError : there is no room; the sequence is gone then, and the caller puts it back.
        """
        stream = streams.stream_of(seq_id)
        cells = streams.cells[stream]
        streams.seq_rm(seq_id)
        n = self.idxs.size
        at = self._place_in(cells, streams.heads[stream], streams.window)
        if at is None:
            raise NoSlotError(f"{n} cells of a snapshot, and stream {stream} has {cells.n - cells.n_used} free")
        if n:
            vacate(cells, at)
            owners = {int(seq_id): np.ones(n, np.bool_)}
            cells.restore(at, CellSnapshot(self.pos, np.zeros(n, np.int32), self.ext, owners))
        if at is self.idxs:
            self.search.repeat(streams, stream)
        else:
            streams.heads[stream] = int(at[-1]) + 1
        return at

    def _place_in(self, cells: KVCells, head: int, window: Window) -> I64Array | None:
        n = self.idxs.size
        if n == 0 or (self.idxs[-1] < cells.n and np.all(cells.pos[self.idxs] == NO_POS)):
            return self.idxs
        free = find_cells(cells, head, n, NO_WINDOW, cont=False)
        return find_cells(cells, head, n, window, cont=False) if free is None else free


def _runs(pos: I32Array) -> Runs:
    """Return ascending positions, some perhaps more than once, as ranges."""
    if pos.size == 0:
        return ()
    breaks = np.flatnonzero(np.diff(pos) > 1) + 1
    return tuple((int(pos[a]), int(pos[b - 1]) + 1) for a, b in pairwise([0, *breaks.tolist(), pos.size]))


def _first_outside(runs: Runs, others: Runs) -> tuple[int, int] | None:
    """Return the first range of positions that is in `runs` and not in `others`."""
    for start, stop in runs:
        first = next((b for a, b in others if a <= start < b), start)  # others do not touch: behind each is a gap
        if first < stop:
            return first, min([stop, *(a for a, _ in others if a > first)])
    return None
