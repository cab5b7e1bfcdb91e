"""Rows of tensors read, written and copied, byte for byte, whatever their type and wherever they lie.

Rows of dims 1 to 3 are counted through.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import TensorError
from pykv.ggml.arena import Arena
from pykv.ggml.ops.shape import view
from pykv.ggml.tensor import Tensor
from pykv.typing import AnyArray, I64Array


def copy_rows(tensor: Tensor, src: I64Array, dst: I64Array) -> None:
    """Copy rows `src` onto rows `dst`, (k,) each. Mutates the tensor's data.

    No row may be twice in `dst`, and a row in both is read before it is written.

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


def read_rows(tensor: Tensor, rows: I64Array) -> AnyArray:
    """Return a copy of (k,) rows, (k, bytes of a row) uint8.

    Raises
    ------
    TensorError : the tensor is not contiguous, or there is no such row.
    """
    row = _row_bytes(tensor, rows)
    out = np.empty((rows.size, row), np.uint8)
    if rows.size == 0:
        return out
    items = host_items(tensor, row)
    if items is not None:
        out.view(items.dtype)[:, 0] = items[tight(rows)]
        return out
    for start, stop in _runs(rows, np.arange(rows.size)):
        tensor.get_into(out[start:stop], int(rows[start]) * row)
    return out


def write_rows(tensor: Tensor, rows: I64Array, data: AnyArray) -> None:
    """Write `data`, (k, bytes of a row) uint8, into (k,) rows, none of them twice. Mutates the tensor's data.

    Raises
    ------
    TensorError : the tensor is not contiguous or read-only, there is no such row, or the data is of another shape.
    """
    row = _row_bytes(tensor, rows)
    if tensor.is_read_only or data.shape != (rows.size, row) or data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise TensorError(f"{tensor!r}: {rows.size} rows of {row} bytes cannot be written from {data.shape}")
    if rows.size == 0:
        return
    items = host_items(tensor, row)
    if items is not None:
        items[tight(rows)] = data.view(items.dtype)[:, 0]
        return
    for start, stop in _runs(rows, np.arange(rows.size)):
        tensor.set(data[start:stop], int(rows[start]) * row)


def move_rows(source: Tensor, src: I64Array, target: Tensor, dst: I64Array) -> None:
    """Copy rows `src` of one tensor onto rows `dst` of another one, (k,) each. Mutates the data of `target`.

    Between two tensors of one device nothing passes through host memory.

    Raises
    ------
    TensorError : rows of different types or widths, a tensor is not contiguous or read-only, there is no such row, or
        the arrays differ in length.
    """
    row = _row_bytes(source, src)
    fits = source.dtype == target.dtype and row == _row_bytes(target, dst) and src.shape == dst.shape
    if not fits or target.is_read_only:
        raise TensorError(f"{src.size} rows of {source!r} cannot be copied onto {dst.size} of {target!r}")
    if src.size == 0:
        return
    items, targets = host_items(source, row), host_items(target, row)
    if items is not None and targets is not None:
        targets[tight(dst)] = items[tight(src)]
        return
    for start, stop in _runs(src, dst):
        arena = Arena(2)
        ends = [_run(arena, one, int(at[start]), stop - start) for one, at in ((source, src), (target, dst))]
        lib.ggml_backend_tensor_copy(*(end.ptr for end in ends))


def host_items(tensor: Tensor, n_bytes: int) -> AnyArray | None:
    """Return a contiguous tensor's data as items of so many bytes, writable, where the CPU can reach it, else None.

    Hold it no longer than the tensor's buffer stays open.
    """
    tensor.check_data()
    # note: ggml notes the buffer of a view late, and ends the process when it is asked about none
    if not lib.ggml_backend_buffer_is_host((tensor.base or tensor).ptr.buffer):
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


def _row_bytes(tensor: Tensor, rows: I64Array) -> int:
    """Return the bytes of a row, if the tensor has all of these."""
    n_rows = tensor.n_elements // tensor.ne[0]
    if not tensor.is_contiguous or (rows.size and not 0 <= rows.min() <= rows.max() < n_rows):
        raise TensorError(f"{tensor!r}: it has no such {rows.size} rows, or they do not lie one after the other")
    tensor.check_data()
    return tensor.dtype.row_size(tensor.ne[0])


def _run(arena: Arena, tensor: Tensor, first: int, n: int) -> Tensor:
    """Return consecutive rows as one, with the buffer that ggml's copy asks a view for."""
    row = tensor.dtype.row_size(tensor.ne[0])
    run = view(arena, tensor, (n * tensor.ne[0], 1, 1, 1), (n * row,) * 3, first * row)
    lib.ggml_backend_view_init(run.ptr)
    return run
