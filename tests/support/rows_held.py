"""The stored bytes of one sequence, found in the raw tensors by plain arithmetic."""

from __future__ import annotations

import numpy as np

from pykv.memory import KVCache


def scribble(cache: KVCache, seed: int = 0) -> None:
    """Fill all K and V of a cache's own with random bytes."""
    rng = np.random.default_rng(seed)
    for _, k, v in cache.store.own_tensors():
        for tensor in (k, v):
            if tensor is not None:
                tensor.set(rng.integers(0, 256, tensor.nbytes, np.uint8))


def rows_held(cache: KVCache, seq_id: int) -> dict[int, bytes]:
    """Return position → K and V of all layers of the cache's own, whatever the layout of V."""
    cache.update()
    stream = cache.streams.stream_of(seq_id)
    cells = cache.streams.cells[stream]
    columns = []
    for _, k, v in cache.store.own_tensors():
        columns.append(k.raw_bytes().reshape(cache.n_stream, cache.n_cells, -1)[stream])
        if v is not None and cache.store.v_trans:
            words = v.raw_bytes().reshape(cache.n_stream, v.ne[0], cache.n_cells, -1)[stream]
            columns.append(words.swapaxes(0, 1).reshape(cache.n_cells, -1))
        elif v is not None:
            columns.append(v.raw_bytes().reshape(cache.n_stream, cache.n_cells, -1)[stream])
    rows = np.concatenate(columns, axis=1)
    return {int(cells.pos[i]): rows[i].tobytes() for i in np.flatnonzero(cells.member(seq_id))}
