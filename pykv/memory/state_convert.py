"""Rows of a state put into a tensor: as they are where they fit, else in another order, type or rotation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from pykv.ggml import DType, from_float, to_float
from pykv.memory.hadamard import hadamard
from pykv.memory.state_cells import CellsOf
from pykv.memory.state_channels import WORDS
from pykv.memory.state_runs import chunks
from pykv.state_format import RowsRecord
from pykv.typing import AnyArray, F32Array, I64Array


@dataclass(frozen=True)
class Form:
    """What the bytes of a row mean: elements of a type, turned by Hadamard's matrix in blocks of `rot`; 0 = not."""

    dtype: DType
    rot: int = 0

    def values(self, rows: AnyArray) -> F32Array:
        """Return (k, bytes of a row) as (k, width) numbers, the rotation undone."""
        n = rows.size // self.dtype.type_size * self.dtype.block_size
        return self._turned(to_float(self.dtype, rows, n).reshape(len(rows), -1))

    def rows(self, values: F32Array) -> AnyArray:
        """Return (k, width) numbers as (k, bytes of a row)."""
        return from_float(self.dtype, self._turned(values)).reshape(len(values), -1)

    def _turned(self, values: F32Array) -> F32Array:
        if not self.rot:
            return values
        with np.errstate(all="ignore"):  # of rows that hold no numbers: what becomes of them, `lost` says
            turned: F32Array = (values.reshape(-1, self.rot) @ hadamard(self.rot)).reshape(values.shape)
        return turned


def fill(
    target: CellsOf, record: RowsRecord, data: AnyArray, forms: tuple[Form, Form], picked: I64Array | None = None
) -> float:
    """Write the rows of a state into cells. Mutates the tensor's data.

    Parameters
    ----------
    data : (n,) uint8, the source that the record's span counts.
    forms : what its rows are in the source, and in the tensor.
    picked : (k,) which rows of the source the cells get; None = all.

    Returns
    -------
    How far the row that lost most is off, as a part of its largest element.
    """
    payload = data[record.span.start : record.span.start + record.span.nbytes]
    have, want = forms
    if picked is None and have == want:
        target.take(payload, record.by_channel)
        return 0.0
    if have == want and target.lies_far_by_channel:
        target.take_channels(partial(_channels, payload, record, target.width, picked))
        return 0.0
    worst = 0.0
    for a, b in chunks(0, target.cells.size, 4 * target.width):
        rows = _rows(payload, record, target.width, slice(a, b) if picked is None else picked[a:b])
        if have != want:
            values = have.values(rows)
            rows = want.rows(values)
            worst = max(worst, lost(values, want.values(rows)))
        target.put(a, rows)
    return worst


def _channels(
    payload: AnyArray, record: RowsRecord, width: int, picked: I64Array | None, channels: slice, part: slice
) -> AnyArray:
    """Return some channels of some rows, (n_channels, k)."""
    which = part if picked is None else picked[part]
    if record.by_channel:
        words: AnyArray = payload.view(WORDS[record.elem_bytes]).reshape(width, -1)
        return words[channels][:, which]
    rows: AnyArray = payload.view(WORDS[record.row_bytes // width]).reshape(-1, width)
    return rows[which, channels].T


def _rows(payload: AnyArray, record: RowsRecord, width: int, which: slice | I64Array) -> AnyArray:
    """Return some rows of a payload cell by cell, (k, bytes of a row)."""
    if not record.by_channel:
        return payload.reshape(-1, record.row_bytes)[which]
    words: AnyArray = payload.view(WORDS[record.elem_bytes]).reshape(width, -1)
    return np.ascontiguousarray(words[:, which].T).view(np.uint8)


def lost(values: F32Array, stored: F32Array) -> float:
    """Return the largest distance in a row as a part of its largest element; infinite where a number is none now."""
    with np.errstate(all="ignore"):
        off = np.abs(stored - values)
        if not np.isfinite(off).all():
            is_same = (stored == values) | (np.isnan(stored) & np.isnan(values))
            off = np.where(is_same, np.float32(0), np.where(np.isnan(off), np.float32(np.inf), off))
        off, size = off.max(axis=1), np.abs(values).max(axis=1)
        parts = np.divide(off, size, out=np.zeros_like(off), where=off > 0)
        return float(np.max(np.where(np.isnan(parts), np.inf, parts), initial=0.0))
