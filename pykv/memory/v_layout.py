"""V stored by channel: turned from rows and back, and its cells copied, read and written.

rows        [n_embd_v, n_cells, n_stream]     a cell's values lie together
transposed  [n_cells, n_embd_v, n_stream]     a channel's values lie together

The tensors are always called `[n_embd_v, n_cells, n_stream]`; transposed is how their bytes are meant. Only types
of one element a block can lie so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykv.cells import RowCopy
from pykv.ggml import Tensor, to_float
from pykv.ggml.tensor_rows import host_items, tight
from pykv.typing import AnyArray, F32Array, I64Array

_WORDS = {2: np.uint16, 4: np.uint32}


def turn_v(tensors: Sequence[Tensor], n_used: int, transposed: bool) -> None:
    """Rewrite tensors `[n_embd_v, n_cells, n_stream]` in the other layout; cells from `n_used` on become zero."""
    width, n_cells, n_stream, _ = tensors[0].ne
    word = _WORDS[tensors[0].dtype.type_size]
    rows, channels = (n_stream, n_cells, width), (n_stream, width, n_cells)
    # all memory is had before the first tensor changes, so that nothing can fail half way
    old = np.empty(rows if transposed else channels, word)
    new = np.zeros(channels if transposed else rows, word)
    for tensor in tensors:
        tensor.get_into(old)
        if transposed:
            new[:, :, :n_used] = old[:, :n_used].swapaxes(1, 2)
        else:
            new[:, :n_used] = old[:, :, :n_used].swapaxes(1, 2)
        tensor.set(new)


def copy_cells(tensor: Tensor, copy: RowCopy) -> None:
    """Copy cells of transposed V onto others."""
    streams = _host_streams(tensor)
    if streams is not None:
        streams[copy.dst_stream][:, tight(copy.dst)] = streams[copy.src_stream][:, tight(copy.src)]
        return
    target = source = _stream(tensor, copy.src_stream)
    if copy.dst_stream != copy.src_stream:
        target = _stream(tensor, copy.dst_stream)
    target[:, copy.dst] = source[:, copy.src]
    tensor.set(target, copy.dst_stream * target.nbytes)


def read_cells(tensor: Tensor, rows: I64Array) -> F32Array:
    """Return transposed V of (k,) rows of one stream, (k, n_embd_v)."""
    n_cells = tensor.ne[1]
    values = np.ascontiguousarray(_stream(tensor, int(rows[0]) // n_cells)[:, rows % n_cells].T)
    return to_float(tensor.dtype, values, values.size).reshape(values.shape)


def cell_bytes(tensor: Tensor, rows: I64Array) -> AnyArray:
    """Return transposed V of (k,) rows of one stream, each as a row would hold it: (k, bytes of a row) uint8."""
    width, n_cells = tensor.ne[:2]
    if rows.size == 0:
        return np.empty((0, tensor.dtype.row_size(width)), np.uint8)
    stream = int(rows[0]) // n_cells
    words = _host_streams(tensor)
    channels = _stream(tensor, stream) if words is None else words[stream]
    return np.ascontiguousarray(channels[:, tight(rows % n_cells)].T).view(np.uint8)


def set_cell_bytes(tensor: Tensor, rows: I64Array, data: AnyArray) -> None:
    """Write what `cell_bytes` returns into (k,) rows of one stream. Mutates the data."""
    if rows.size == 0:
        return
    n_cells, word = tensor.ne[1], _WORDS[tensor.dtype.type_size]
    stream, cells, columns = int(rows[0]) // n_cells, tight(rows % n_cells), data.view(word).T
    words = _host_streams(tensor)
    if words is not None:
        words[stream][:, cells] = columns
        return
    channels = _stream(tensor, stream)
    channels[:, cells] = columns
    tensor.set(channels, stream * channels.nbytes)


def _host_streams(tensor: Tensor) -> AnyArray | None:
    """Return the words of all streams where they lie, (n_stream, n_embd_v, n_cells), if the CPU can reach them."""
    width, n_cells, n_stream, _ = tensor.ne
    items = host_items(tensor, tensor.dtype.type_size)
    return None if items is None else items.view(_WORDS[tensor.dtype.type_size]).reshape(n_stream, width, n_cells)


def _stream(tensor: Tensor, stream: int) -> AnyArray:
    """Return a copy of one stream's words, (n_embd_v, n_cells)."""
    width, n_cells = tensor.ne[:2]
    words = np.empty((width, n_cells), _WORDS[tensor.dtype.type_size])
    tensor.get_into(words, stream * words.nbytes)
    return words
