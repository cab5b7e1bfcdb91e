"""Graph inputs that are read off the cells: relative position buckets and previous tokens.

Both take the cells as they are after `apply` and change nothing. Source: spec kv_cache.md sections 11 and 12;
follows llama.cpp's ``llama_relative_position_bucket`` and ``set_input_pos_bucket``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from pykv.batch.ubatch import UBatch
from pykv.cells.cell_table import NO_TOKEN
from pykv.cells.slot import SlotInfo
from pykv.cells.streams import CellStreams
from pykv.errors import BatchError, ParamError
from pykv.typing import I32Array, I64Array

_MAX_DISTANCE = 128
"""From this distance on, everything falls into the last bucket."""


def relative_bucket(p0: ArrayLike, p1: ArrayLike, n_buckets: int, *, bidirectional: bool) -> I32Array:
    """Return the bucket of keys at `p0` seen from queries at `p1`; the arguments broadcast.

    Small distances have a bucket each, larger ones share them on a logarithmic scale (T5, arXiv:1910.10683).
    With `bidirectional` half of the buckets are for later keys; else those count as distance 0.
    """
    delta = np.asarray(p1, np.int64) - np.asarray(p0, np.int64)
    n = n_buckets // 2 if bidirectional else n_buckets
    table = _bucket_of_distance(n)
    distance = np.abs(delta) if bidirectional else np.maximum(delta, 0)
    bucket = table[np.minimum(distance, _MAX_DISTANCE)]
    return bucket + np.where(delta < 0, np.int32(n), np.int32(0)) if bidirectional else bucket


def position_buckets(streams: CellStreams, ubatch: UBatch, n_kv: int, n_buckets: int) -> I32Array:
    """Return (n_tokens, n_kv) bucket of each cell for each token of a decoder; empty cells are at position -1.

    Raises
    ------
    ParamError
        With several streams.
    BatchError
        For a ubatch of equal sequences.
    """
    if streams.n_stream != 1:
        raise ParamError(f"streams: {streams.n_stream} of them, position buckets need a unified cache")
    if ubatch.equal_seqs:
        raise BatchError("ubatch: split into equal sequences, position buckets need the simple split")
    return relative_bucket(streams.cells[0].pos[:n_kv], ubatch.pos[0][:, None], n_buckets, bidirectional=False)


def encoder_position_buckets(ubatch: UBatch, n_buckets: int) -> I32Array:
    """Return (n_tokens, n_tokens) bucket of each token, as key, for each token, as query."""
    return relative_bucket(ubatch.pos[0], ubatch.pos[0][:, None], n_buckets, bidirectional=True)


def previous_tokens(streams: CellStreams, slot: SlotInfo, ubatch: UBatch, n: int) -> I32Array:
    """Return (n_tokens, n) tokens before each token of the ubatch, the nearest last; -1 where there is none.

    Each token looks through its first sequence. Embeddings may repeat positions: their predecessors within the
    ubatch count by order.
    """
    out = np.full((ubatch.n_tokens, n), NO_TOKEN, np.int32)
    per_stream = ubatch.n_tokens // len(slot.streams)
    for k, stream in enumerate(slot.streams):
        block = slice(k * per_stream, (k + 1) * per_stream)
        seqs = ubatch.seq_first[block]
        for s in np.unique(seqs):
            rows = block.start + np.flatnonzero(seqs == s)
            wanted = _predecessors(ubatch.pos[0, rows].astype(np.int64), n, by_order=ubatch.token is None)
            known = wanted >= 0
            found = np.full(wanted.shape, NO_TOKEN, np.int32)
            if known.any():
                found[known] = streams.cells[stream].tokens_le(int(s), wanted[known])
            out[rows] = found
    return out


def _predecessors(pos: I64Array, n: int, *, by_order: bool) -> I64Array:
    """Return (k, n) positions of the n predecessors of the k tokens of one sequence, perhaps negative."""
    back = np.arange(n, 0, -1)
    if not by_order:
        return np.asarray(pos[:, None] - back)
    rank = np.arange(pos.size)[:, None] - back
    return np.asarray(np.where(rank >= 0, pos[np.maximum(rank, 0)], pos[0] + rank))


def _bucket_of_distance(n: int) -> I32Array:
    """Return the bucket of each distance from 0 to `_MAX_DISTANCE`, out of `n`."""
    exact = n // 2
    r = np.arange(_MAX_DISTANCE + 1)
    # float32 logarithm, then double: where a power of two falls on a border, this rounds as llama.cpp does
    log = np.log(np.maximum(r, 1).astype(np.float32) / np.float32(exact)) * np.float32(n - exact)
    far = np.floor(exact + log / np.log(_MAX_DISTANCE / exact))
    return np.where(r < exact, r, np.minimum(n - 1, far)).astype(np.int32)
