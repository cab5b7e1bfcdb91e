"""Rows of a state on their way into another: gathered, converted and laid out piece by piece, never all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pykv.memory.state_channels import WORDS, tiles
from pykv.memory.state_convert import Form, lost
from pykv.memory.state_runs import chunks
from pykv.runtime.states.read_state import StoredRows
from pykv.state_format import RowsLayout
from pykv.typing import AnyArray, I64Array


class Taken(NamedTuple):
    """Rows of one tensor of the source that go into a tensor of the result; `picked` None = all, in their order."""

    rows: StoredRows
    picked: I64Array | None

    @property
    def n(self) -> int:
        """How many."""
        return self.rows.n if self.picked is None else self.picked.size

    def which(self, start: int, stop: int) -> slice | I64Array:
        """Return where some of them are in the source."""
        return slice(start, stop) if self.picked is None else self.picked[start:stop]


@dataclass
class MovedRows:
    """One tensor of the result.

    Attributes
    ----------
    sources : whose rows follow one another in it.
    form, by_channel : how it stores them.
    error : how far the row that lost most is off, as a part of its largest element; known once all was sent.
    """

    sources: Sequence[Taken]
    form: Form
    by_channel: bool = False
    error: float = 0.0

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.sources[0].rows.width

    @property
    def layout(self) -> RowsLayout:
        """What a state says of it."""
        dtype = self.form.dtype
        return RowsLayout(int(dtype), dtype.row_size(self.width), dtype.type_size if self.by_channel else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.layout.row_bytes * sum(source.n for source in self.sources)

    def pieces(self) -> Iterator[AnyArray]:
        """Yield all bytes in order, in arrays of bounded size."""
        if self.by_channel:
            yield from self._channels()
            return
        for source in self.sources:
            yield from self._rows(source)

    def _rows(self, source: Taken) -> Iterator[AnyArray]:
        if self._is_as_it_lies(source):
            payload = source.rows.payload
            for a, b in chunks(0, payload.size, 1):
                yield payload[a:b]
            return
        for a, b in chunks(0, source.n, 4 * self.width):
            yield np.ascontiguousarray(self._converted(source, source.which(a, b), slice(0, self.width)))

    def _is_as_it_lies(self, source: Taken) -> bool:
        return source.picked is None and not source.rows.record.by_channel and source.rows.form == self.form

    def _channels(self) -> Iterator[AnyArray]:
        """Yield channel by channel. Elements that are stored or rotated together are converted together."""
        n, size = sum(source.n for source in self.sources), self.form.dtype.type_size
        for channels, cells in tiles(self.width, n, size):
            out = np.empty((channels.stop - channels.start, cells.stop - cells.start), WORDS[size])
            first = 0
            for source in self.sources:
                start, stop = max(cells.start, first), min(cells.stop, first + source.n)
                if start < stop:
                    here = out[:, start - cells.start : stop - cells.start]
                    self._put_channels(here, source, start - first, channels)
                first += source.n
            yield out

    def _put_channels(self, out: AnyArray, source: Taken, start: int, channels: slice) -> None:
        """Write (n_channels, k) elements of the k rows from `start` on."""
        grain = self._grain(source)
        near = slice(channels.start // grain * grain, min(-(-channels.stop // grain) * grain, self.width))
        inside = slice(channels.start - near.start, channels.stop - near.start)
        for a, b in chunks(0, out.shape[1], 4 * (near.stop - near.start)):
            rows = self._converted(source, source.which(start + a, start + b), near)
            out[:, a:b] = np.ascontiguousarray(rows).view(out.dtype)[:, inside].T

    def _grain(self, source: Taken) -> int:
        have = source.rows.form
        return 1 if have == self.form else max(have.dtype.block_size, have.rot, self.form.rot)

    def _converted(self, source: Taken, which: slice | I64Array, elements: slice) -> AnyArray:
        """Return some elements of some rows as they are stored in the result: (k, bytes)."""
        rows = source.rows.raw(which, elements)
        have = source.rows.form
        if have == self.form:
            return rows
        values = have.values(np.ascontiguousarray(rows))
        stored = self.form.rows(values)
        self.error = max(self.error, lost(values, self.form.values(stored)))
        return stored
