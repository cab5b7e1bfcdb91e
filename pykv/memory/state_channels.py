"""V as a table of channels by cells, however it lies: for states that hold it by channel, and memories that do.

Moved in tiles of bounded size, through numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykv.ggml import Tensor
from pykv.ggml.tensor_rows import host_items, tight
from pykv.memory.state_runs import STAGING_BYTES, chunks, windows
from pykv.typing import AnyArray, I64Array

WORDS: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
"""Elements as whole numbers, by their bytes."""


@dataclass(frozen=True, eq=False)
class ChannelTable:
    """The V of one stream `[width, n_cells, n_stream]`, of a type of one element a block.

    Attributes
    ----------
    by_channel : whether a channel's cells lie together, else a cell's channels.
    """

    tensor: Tensor
    stream: int
    by_channel: bool

    @property
    def word(self) -> np.dtype[Any]:
        """The type of its elements here."""
        return WORDS[self.tensor.dtype.type_size]

    def get(self, channels: slice, cells: I64Array) -> AnyArray:
        """Return some channels of (k,) ascending cells, (n_channels, k), which may lie in the tensor."""
        table = self._on_host()
        if table is not None:
            return _picked(table, channels, tight(cells)) if self.by_channel else table[tight(cells), channels].T
        out = np.empty((channels.stop - channels.start, cells.size), self.word)
        for (js, ks), at, near in self._tiles(channels, cells):
            self.tensor.get_into(near, at)
            out[js, ks] = self._inside(near, channels, cells[ks])
        return out

    def put(self, channels: slice, cells: I64Array, data: AnyArray) -> None:
        """Write (n_channels, k) elements of (k,) ascending cells. Mutates the tensor's data."""
        table = self._on_host()
        if table is not None:
            if self.by_channel:
                _set(table, channels, tight(cells), data)
            else:
                table[tight(cells), channels] = data.T
            return
        for (js, ks), at, near in self._tiles(channels, cells):
            self.tensor.get_into(near, at)
            self._inside(near, channels, cells[ks], data[js, ks])
            self.tensor.set(near, at)

    def _on_host(self) -> AnyArray | None:
        """Return the table as it lies, (width, n_cells) or (n_cells, width), where the CPU can reach it; writable."""
        items = host_items(self.tensor, self.word.itemsize)
        if items is None:
            return None
        width, n_cells, n_stream, _ = self.tensor.ne
        shape = (n_stream, width, n_cells) if self.by_channel else (n_stream, n_cells, width)
        table: AnyArray = items.view(self.word).reshape(shape)[self.stream]
        return table

    def _tiles(self, channels: slice, cells: I64Array) -> Iterator[tuple[tuple[slice, slice], int, AnyArray]]:
        """Yield which part of the result comes from where: a byte of the tensor, and a buffer for what lies there."""
        width, n_cells = self.tensor.ne[:2]
        size, start = self.word.itemsize, self.stream * width * n_cells
        if self.by_channel:
            for a, b in chunks(channels.start, channels.stop, n_cells * size):
                part = slice(a - channels.start, b - channels.start), slice(0, cells.size)
                yield part, (start + a * n_cells) * size, np.empty((b - a, n_cells), self.word)
        else:
            for a, b, first, last in windows(cells, width * size):
                part = slice(0, channels.stop - channels.start), slice(a, b)
                yield part, (start + first * width) * size, np.empty((last - first, width), self.word)

    def _inside(self, near: AnyArray, channels: slice, cells: I64Array, data: AnyArray | None = None) -> AnyArray:
        """Return the part of a buffer that is meant, (n_channels, k); with `data`, write it first."""
        table = near if self.by_channel else near[:, channels].T
        at = cells if self.by_channel else cells - cells[0]
        if data is not None:
            table[:, at] = data
        picked: AnyArray = table[:, at]
        return picked


def _picked(table: AnyArray, channels: slice, cells: slice | I64Array) -> AnyArray:
    """Return a copy of some cells of some rows of a table by channel."""
    if isinstance(cells, slice):
        return np.array(table[channels, cells])
    return np.take(table[channels], cells, axis=1, mode="clip")


def _set(table: AnyArray, channels: slice, cells: slice | I64Array, data: AnyArray) -> None:
    if isinstance(cells, slice):
        table[channels, cells] = data
        return
    for row, values in zip(table[channels], data, strict=True):  # numpy takes several times as long for all at once
        row[cells] = values


def tiles(n_channels: int, n_cells: int, item_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Yield channels and cells of pieces that lie together where all cells of a channel do, in the order of bytes."""
    n = STAGING_BYTES // max(1, n_cells * item_bytes)
    if n:
        for j in range(0, n_channels, n):
            yield slice(j, min(j + n, n_channels)), slice(0, n_cells)
        return
    for j in range(n_channels):
        for a, b in chunks(0, n_cells, item_bytes):
            yield slice(j, j + 1), slice(a, b)
