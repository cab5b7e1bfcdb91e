"""The rows of some cells in one stored tensor, as a state holds them: cell by cell, or V by channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pykv.ggml import Tensor
from pykv.ggml.tensor_rows import host_items
from pykv.memory.state_channels import ChannelTable, tiles
from pykv.memory.state_runs import Sink, chunks, send_rows, store_rows
from pykv.typing import AnyArray, I64Array


@dataclass(frozen=True, eq=False)
class CellsOf:
    """Some cells in a tensor `[width or more, n_cells, n_stream]`.

    Attributes
    ----------
    cells : (k,) which, in the order of the state; those of a KV cache ascend.
    width : elements of a cell's row in a state; less than the tensor's where rows are padded.
    by_channel : whether V lies by channel in the tensor now. A state may hold it either way.
    """

    tensor: Tensor
    cells: I64Array
    width: int
    stream: int = 0
    by_channel: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell."""
        return self.tensor.dtype.row_size(self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.row_bytes * self.cells.size

    def send(self, sink: Sink, by_channel: bool) -> None:
        """Give all to a sink, cell by cell or by channel."""
        if by_channel:
            for channels, part in tiles(self.width, self.cells.size, self.tensor.dtype.type_size):
                sink(_bytes(self._table.get(channels, self.cells[part])))
        elif self._is_plain:
            send_rows(self.tensor, self._rows, sink)
        else:
            for a, b in chunks(0, self.cells.size, self.row_bytes):
                sink(_bytes(self._table.get(slice(0, self.width), self.cells[a:b]).T))

    def take(self, data: AnyArray, by_channel: bool) -> None:
        """Write `nbytes` bytes, (n,) uint8, that `send` would give. Mutates the tensor's data."""
        if not by_channel:
            self.put(0, data.reshape(self.cells.size, self.row_bytes))
            return
        words = data.view(self._table.word).reshape(self.width, self.cells.size)
        self.take_channels(lambda channels, part: words[channels, part])

    def take_channels(self, words_of: Callable[[slice, slice], AnyArray]) -> None:
        """Write what is asked for by channels and a range of `cells`, (n_channels, k) elements. Mutates the data.

        Each channel is written once: where only whole ones can be moved, by far faster than `put` for some cells.
        """
        for channels, part in tiles(self.width, self.cells.size, self.tensor.dtype.type_size):
            self._table.put(channels, self.cells[part], words_of(channels, part))

    @property
    def lies_far_by_channel(self) -> bool:
        """Whether a channel must be fetched and sent for any of its cells."""
        return self.by_channel and host_items(self.tensor, 1) is None

    def put(self, start: int, rows: AnyArray) -> None:
        """Write (k, `row_bytes`) uint8 of the cells from the `start`-th on. Mutates the tensor's data."""
        if self._is_plain:
            store_rows(self.tensor, self._rows[start : start + len(rows)], rows)
            return
        for a, b in chunks(0, len(rows), self.row_bytes):
            words = np.ascontiguousarray(rows[a:b]).view(self._table.word)
            self._table.put(slice(0, self.width), self.cells[start + a : start + b], words.T)

    @property
    def _is_plain(self) -> bool:
        return not self.by_channel and self.width == self.tensor.ne[0]

    @property
    def _rows(self) -> I64Array:
        return self.cells + self.stream * self.tensor.ne[1]

    @property
    def _table(self) -> ChannelTable:
        return ChannelTable(self.tensor, self.stream, self.by_channel)


def _bytes(array: AnyArray) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")
