"""V stored by channel: turned from rows and back, and its cells copied and read.

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
    width, n_cells, n_stream, _ = tensor.ne
    items = host_items(tensor, tensor.dtype.type_size)
    if items is not None:
        streams = items.view(_WORDS[tensor.dtype.type_size]).reshape(n_stream, width, n_cells)
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


def _stream(tensor: Tensor, stream: int) -> AnyArray:
    """Return a copy of one stream's words, (n_embd_v, n_cells)."""
    width, n_cells = tensor.ne[:2]
    words = np.empty((width, n_cells), _WORDS[tensor.dtype.type_size])
    tensor.get_into(words, stream * words.nbytes)
    return words
