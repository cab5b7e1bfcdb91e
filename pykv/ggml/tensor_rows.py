"""Rows of a tensor copied onto other rows of it, byte for byte, whatever their type and wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import TensorError
from pykv.ggml.tensor import Tensor
from pykv.typing import AnyArray, I64Array


def copy_rows(tensor: Tensor, src: I64Array, dst: I64Array) -> None:
    """Copy rows `src` onto rows `dst`, (k,) each. Mutates the tensor's data.

    Rows of dims 1 to 3 are counted through. No row may be twice in `dst`, and a row in both is read before it is
    written.

    Raises
    ------
    TensorError : the tensor is not contiguous or read-only, there is no such row, or the arrays differ in length.
    """
    n_rows = tensor.n_elements // tensor.ne[0]
    ok = tensor.is_contiguous and not tensor.is_read_only and src.shape == dst.shape
    if not ok or (src.size and not 0 <= min(src.min(), dst.min()) <= max(src.max(), dst.max()) < n_rows):
        raise TensorError(f"{tensor!r}: {src.size} of its {n_rows} rows cannot be copied onto {dst.size} others")
    if src.size == 0:
        return
    row = tensor.dtype.row_size(tensor.ne[0])
    rows = host_items(tensor, row)
    if rows is not None:
        rows[tight(dst)] = rows[tight(src)]
        return
    runs = list(_runs(src, dst))
    parts: list[AnyArray] = [np.empty((stop - start) * row, np.uint8) for start, stop in runs]
    for part, (start, _) in zip(parts, runs, strict=True):
        tensor.get_into(part, int(src[start]) * row)
    for part, (start, _) in zip(parts, runs, strict=True):
        tensor.set(part, int(dst[start]) * row)


def host_items(tensor: Tensor, n_bytes: int) -> AnyArray | None:
    """Return a contiguous tensor's data as items of so many bytes, writable, where the CPU can reach it, else None.

    Hold it no longer than the tensor's buffer stays open.
    """
    tensor.check_data()
    if not lib.ggml_backend_buffer_is_host(tensor.ptr.buffer):
        return None
    return np.frombuffer(ffi.buffer(tensor.raw.data, tensor.nbytes), np.dtype((np.void, n_bytes)))


def tight(rows: I64Array) -> slice | I64Array:
    """Return consecutive rows as a slice: numpy copies slices much faster."""
    first = int(rows[0])
    if int(rows[-1]) - first + 1 == rows.size and np.all(rows[1:] > rows[:-1]):
        return slice(first, first + rows.size)
    return rows


def _runs(src: I64Array, dst: I64Array) -> Iterator[tuple[int, int]]:
    """Yield the stretches in which both go up by one."""
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    yield from pairwise([0, *breaks.tolist(), src.size])
