"""Turn stored V from rows to channels and back: the same values in the same bytes, read best by different paths.

rows        [n_embd_v, n_cells, n_stream]     a cell's values lie together
transposed  [n_cells, n_embd_v, n_stream]     a channel's values lie together
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykv.ggml import Tensor

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
