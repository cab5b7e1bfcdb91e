"""Rows of stored tensors, to a sink and from bytes, in runs as long as they lie.

Where the CPU reaches a tensor, a run of rows is handed over where it lies, and a stretch of short runs is gathered by
numpy; elsewhere all passes through one buffer. Rows that ascend are moved in few calls, however scattered they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pykv.ggml import Tensor
from pykv.ggml.tensor_rows import host_items, tight
from pykv.typing import AnyArray, I64Array

Sink = Callable[[memoryview], object]
"""Takes bytes, and is done with them when it returns."""

STAGING_BYTES = 2**20
"""What is gathered at once, at most: about what a core's caches hold."""

DIRECT_BYTES = 2**14
"""A run of so many bytes is worth a call of its own."""


def send_rows(tensor: Tensor, rows: I64Array, sink: Sink) -> None:
    """Give a contiguous tensor's (k,) rows to a sink, in their order."""
    row = tensor.dtype.row_size(tensor.ne[0])
    host = host_items(tensor, row)
    for start, stop, is_run in segments(rows, row):
        if host is not None and is_run:
            first = int(rows[start])
            sink(host[first : first + stop - start].view(np.uint8).data.toreadonly())
            continue
        for a, b in chunks(start, stop, row):
            sink(_fetch(tensor, rows[a:b]).data.cast("B"))


def store_rows(tensor: Tensor, rows: I64Array, data: AnyArray) -> None:
    """Write (k, bytes of a row) uint8 into a contiguous tensor's (k,) rows, none of them twice. Mutates its data."""
    row = tensor.dtype.row_size(tensor.ne[0])
    host = host_items(tensor, row)
    for start, stop, is_run in segments(rows, row):
        some = data[start:stop]
        if host is not None:
            first = int(rows[start])
            at = slice(first, first + stop - start) if is_run else rows[start:stop]
            host[at] = some.view(host.dtype)[:, 0]
        elif is_run:
            for a, b in chunks(start, stop, row):
                tensor.set(np.ascontiguousarray(data[a:b]), int(rows[a]) * row)
        else:
            _store_scattered(tensor, rows[start:stop], some)


def segments(rows: I64Array, row_bytes: int) -> Iterator[tuple[int, int, bool]]:
    """Yield stretches of ascending rows, and whether each is one run: long runs alone, short ones together."""
    if rows.size == 0:
        return
    if isinstance(tight(rows), slice):
        yield 0, rows.size, True
        return
    starts = np.concatenate(([0], np.flatnonzero(np.diff(rows) != 1) + 1))
    stops = np.append(starts[1:], rows.size)
    is_long = (stops - starts) * row_bytes >= DIRECT_BYTES
    is_first = np.ones(starts.size, np.bool_)
    is_first[1:] = is_long[1:] | is_long[:-1] | (rows[starts[1:]] < rows[starts[1:] - 1])
    firsts = np.flatnonzero(is_first)
    n_runs = np.diff(np.append(firsts, starts.size))
    for i, n in zip(firsts.tolist(), n_runs.tolist(), strict=True):
        yield int(starts[i]), int(stops[i + n - 1]), n == 1


def chunks(start: int, stop: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of as many items as are gathered at once."""
    n = max(1, STAGING_BYTES // max(1, item_bytes))
    for at in range(start, stop, n):
        yield at, min(at + n, stop)


def windows(rows: I64Array, row_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield which of ascending rows lie so near each other that all between them is moved at once.

    Start and stop among the rows, and the first row and the one behind the last.
    """
    n, start = max(1, STAGING_BYTES // row_bytes), 0
    while start < rows.size:
        first = int(rows[start])
        stop = int(np.searchsorted(rows, first + n))
        yield start, stop, first, int(rows[stop - 1]) + 1
        start = stop


def _fetch(tensor: Tensor, rows: I64Array) -> AnyArray:
    """Return a copy of a contiguous tensor's (k,) rows, which ascend: (k, bytes of a row) uint8."""
    row = tensor.dtype.row_size(tensor.ne[0])
    out = np.empty((rows.size, row), np.uint8)
    host = host_items(tensor, row)
    if host is not None:
        np.take(host, rows, out=out.view(host.dtype)[:, 0], mode="clip")
        return out
    for start, stop, first, last in windows(rows, row):
        near = np.empty((last - first, row), np.uint8)
        tensor.get_into(near, first * row)
        out[start:stop] = near[rows[start:stop] - first]
    return out


def _store_scattered(tensor: Tensor, rows: I64Array, data: AnyArray) -> None:
    row = data.shape[1]
    for start, stop, first, last in windows(rows, row):
        near = np.empty((last - first, row), np.uint8)
        tensor.get_into(near, first * row)
        near[rows[start:stop] - first] = data[start:stop]
        tensor.set(near, first * row)
