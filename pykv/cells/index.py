"""Where the K and V rows of a slot go, as indices for a scatter.

Source: spec kv_cache.md section 8; follows llama.cpp's ``set_input_k_idxs`` and ``set_input_v_idxs``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pykv.cells.slot import SlotInfo
from pykv.typing import I64Array


def row_indices(slot: SlotInfo, n_cells: int) -> I64Array:
    """Return (n_tokens,) row of each token in K, or in V stored by rows, all streams being one run of rows.

    `n_cells` counts the cells of one stream.
    """
    if slot.streams == (0,):
        return slot.idxs.reshape(-1)
    base = np.asarray(slot.streams, np.int64) * n_cells
    return (slot.idxs + base[:, None]).reshape(-1)


def element_indices(slot: SlotInfo, n_cells: int, n_embd_v: int) -> I64Array:
    """Return (n_tokens * n_embd_v,) element of each value in V stored by channels, token after token.

    `n_cells` counts the cells of one stream, `n_embd_v` the values of the widest V row of all layers.
    """
    first = slot.idxs
    if slot.streams != (0,):
        first = first + np.asarray(slot.streams, np.int64)[:, None] * (n_cells * n_embd_v)
    return (first.reshape(-1, 1) + _channels(n_cells, n_embd_v)).reshape(-1)


@lru_cache(maxsize=8)
def _channels(n_cells: int, n_embd_v: int) -> I64Array:
    """Return (n_embd_v,) where each channel of one stream begins; the same for every token of a cache."""
    return np.arange(n_embd_v) * n_cells
