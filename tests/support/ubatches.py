"""Make ubatches by hand, for tests that start below the batch layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykv.batch.ubatch import UBatch

Ids = int | Sequence[int]


def ubatch(
    entries: Sequence[tuple[Ids, int]],
    *,
    tokens: Sequence[int] | None = None,
    embd: bool = False,
    xy: Sequence[tuple[int, int]] | None = None,
    equal: bool = False,
) -> UBatch:
    """Make a ubatch of ``(sequence ids, position)`` entries.

    Token ids are 100, 101, ... unless given; with `embd` there are none. `xy` gives each token a column and a row and
    so makes positions 2-D. With `equal` the entries stand sequence set by sequence set, as an equal split leaves them.
    """
    ids = tuple((s,) if isinstance(s, int) else tuple(sorted(s)) for s, _ in entries)
    n = len(entries)
    pos = np.zeros((4 if xy else 1, n), np.int32)
    pos[0] = [p for _, p in entries]
    if xy:
        pos[2], pos[1] = np.array(xy).T
    token = None if embd else np.array(tokens if tokens is not None else range(100, 100 + n), np.int32)
    return UBatch(
        token=token,
        embd=np.zeros((n, 2), np.float32) if embd else None,
        pos=pos,
        seq_ids=ids,
        seq_first=np.array([group[0] for group in ids], np.int32),
        seq_id_unq=tuple(sorted({s for group in ids for s in group})),
        output=np.zeros(n, np.bool_),
        batch_idxs=np.arange(n, dtype=np.int32),
        n_seqs=len(set(ids)) if equal else n,
        equal_seqs=equal,
    )


def run(seq_id: Ids, first: int, end: int) -> UBatch:
    """Make the ubatch of one sequence at positions ``[first, end)``."""
    return ubatch([(seq_id, p) for p in range(first, end)])
