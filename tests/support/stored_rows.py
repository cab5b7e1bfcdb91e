"""Rows of numbers beside a cache's bookkeeping, which follow it as stored keys do, only simpler."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pykv.batch.ubatch import UBatch
from pykv.cells import CellStreams, SlotInfo
from pykv.cells.row_copy import needed_copies


class StoredRows:
    """What is stored in each cell: a token, and the angle by which its key is turned.

    Attributes
    ----------
    rows : (n_stream, n_cells, 2) token and angle.
    """

    def __init__(self, streams: CellStreams) -> None:
        self._streams = streams
        self.rows = np.zeros((streams.n_stream, streams.n_cells, 2), np.int64)
        self._next = 1

    def fresh(self, n: int) -> list[int]:
        """Return tokens that have not been stored before."""
        self._next += n
        return list(range(self._next - n, self._next))

    def write(self, slot: SlotInfo, ub: UBatch, tokens: list[int]) -> None:
        """Store the tokens of a ubatch, with keys turned to their positions."""
        for k, stream in enumerate(slot.streams):
            for j, cell in enumerate(slot.idxs[k].tolist()):
                i = k * slot.idxs.shape[1] + j
                self.rows[stream, cell] = tokens[i], ub.pos[0, i]

    def update(self, at_most: int | None = None) -> None:
        """Carry out what is queued, or only that many pieces of it, as if the device failed then."""
        for done, _ in enumerate(self._work(), 1):
            if done == at_most:
                return
        self._streams.reset_shift()

    def after_update(self) -> NDArray[np.int64]:
        """Return the rows as an update would leave them. Does not change them."""
        rows = self.rows.copy()
        for copy in needed_copies(self._streams.pending_copies, self._streams.cells):
            rows[copy.dst_stream, copy.dst] = rows[copy.src_stream, copy.src]
        moved, deltas = self._streams.moved_rows()
        rows.reshape(-1, 2)[moved, 1] += deltas
        return rows

    def of_sequence(self, s: int) -> list[tuple[int, int, int]]:
        """Return (position, token, angle) of each cell of a sequence once all is done, sorted."""
        stream = self._streams.stream_of(s)
        cells, rows = self._streams.cells[stream], self.after_update()[stream]
        return sorted((int(cells.pos[i]), *rows[i].tolist()) for i in np.flatnonzero(cells.member(s)))

    def _work(self) -> Iterator[None]:
        queue = self._streams.pending_copies
        queue[:] = needed_copies(queue, self._streams.cells)
        while queue:
            copy = queue[0]
            self.rows[copy.dst_stream, copy.dst] = self.rows[copy.src_stream, copy.src]
            del queue[0]
            yield
        moved, deltas = self._streams.moved_rows()
        for row, delta in zip(moved, deltas, strict=True):
            self.rows.reshape(-1, 2)[row, 1] += delta
            self._streams.reset_shift(np.array([row]))
            yield
