"""Cells as a state file lists them, put into the streams of a KV cache.

Knows neither files nor tensors: rows are written by whoever loads the cells. Source: spec state_format.md section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pykv.cells.cell_table import NO_TOKEN
from pykv.cells.kv_cells import CellSnapshot
from pykv.cells.placing import vacate
from pykv.cells.slot import find_cells
from pykv.cells.streams import CellStreams
from pykv.cells.window import NO_WINDOW
from pykv.errors import NoSlotError
from pykv.typing import I32Array, I64Array


@dataclass(frozen=True, eq=False)
class LoadedCells:
    """k cells of one stream.

    Attributes
    ----------
    pos : (k,) positions.
    ext : (k, 3) column, row and token; None = not known.
    n_ids : (k,) of how many sequences each is.
    ids : (sum of n_ids,) these, cell by cell, none twice in one cell.
    """

    pos: I32Array
    ext: I32Array | None
    n_ids: I32Array
    ids: I32Array

    def columns(self) -> tuple[I32Array, I32Array, I32Array]:
        """Return column, row and token, (k,) each."""
        if self.ext is not None:
            x, y, token = np.ascontiguousarray(self.ext.T, np.int32)
            return x, y, token
        # differs from llama.cpp: a token that is not known is none (there: token 0, if one sequence is loaded)
        zeros = np.zeros(self.pos.size, np.int32)
        return zeros, zeros, np.full_like(zeros, NO_TOKEN)

    def snapshot(self, seq_id: int | None = None) -> CellSnapshot:
        """Return them as a stream takes them, all of one sequence if that is named."""
        n = self.pos.size
        if seq_id is None:
            cell = np.repeat(np.arange(n), self.n_ids)
            owners = {}
            for s in np.unique(self.ids).tolist():
                owners[s] = np.zeros(n, np.bool_)
                owners[s][cell[self.ids == s]] = True
        else:
            owners = {seq_id: np.ones(n, np.bool_)} if n else {}
        return CellSnapshot(np.asarray(self.pos, np.int32), np.zeros(n, np.int32), self.columns(), owners)


def put_sequence(streams: CellStreams, seq_id: int, loaded: LoadedCells) -> I64Array:
    """Let a sequence hold these cells and no others, wherever there is room. Mutates the bookkeeping.

    Returns
    -------
    (k,) the cells that they are in now, ascending, so that the order of cells is that of the file.

    Raises
    ------
    NoSlotError : there is no room; the sequence is gone then, and the caller puts it back.
    """
    # differs from llama.cpp: nothing to load leaves nothing behind (there: what the sequence held before, though
    # another part of the same memory may have been emptied)
    streams.n_changes += 1
    streams.seq_rm(seq_id)
    stream, n = streams.stream_of(seq_id), loaded.pos.size
    if n == 0:
        return np.empty(0, np.int64)
    cells = streams.cells[stream]
    # differs from llama.cpp: cells that hold what a window hides are taken last (there: as they come), so that other
    # sequences keep all they have while there is room
    free = find_cells(cells, streams.heads[stream], n, NO_WINDOW, cont=False)
    found = find_cells(cells, streams.heads[stream], n, streams.window, cont=False) if free is None else free
    if found is None:
        raise NoSlotError(f"{n} cells of a state, and stream {stream} has {cells.n - cells.n_used} of {cells.n} free")
    # differs from llama.cpp: cells found around the end of the ring are taken in order (there: as found), so that
    # what is saved next is the same to the byte
    at = np.sort(found)
    vacate(cells, at)
    cells.restore(at, loaded.snapshot(int(seq_id)))
    streams.heads[stream] = int(found[-1]) + 1
    return at


def put_all(streams: CellStreams, loaded: Sequence[LoadedCells]) -> None:
    """Let each stream hold these cells, from the first one on, and no others. Mutates the bookkeeping.

    Raises
    ------
    NoSlotError : there are too few; nothing has changed.
    """
    for stream, some in enumerate(loaded):
        if some.pos.size > streams.n_cells:
            raise NoSlotError(
                f"stream {stream}: {some.pos.size} cells of a state, and a stream has {streams.n_cells} cells"
            )
    streams.clear()
    for cells, some in zip(streams.cells, loaded, strict=True):
        cells.restore(np.arange(some.pos.size), some.snapshot())
