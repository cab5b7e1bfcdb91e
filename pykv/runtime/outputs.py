"""Logits of one batch: written in the order of computation, read in the order of the batch.

Source: spec params.md section 5, decode.md section 5.
"""

from __future__ import annotations

import numpy as np

from pykv.typing import F32Array, I32Array


class Outputs:
    """Rows of logits, one per token whose output was wanted.

    A new batch gets a new object and new memory, (n_outputs, n_vocab), so rows that a caller kept stay what they were.
    """

    def __init__(self, rows: F32Array) -> None:
        self._rows = rows
        self._n_written = 0
        self._batch_idxs: list[I32Array] = []

    def room_for(self, batch_idxs: I32Array) -> F32Array:
        """Return where to write the rows of a ubatch, given the batch indices of its outputs."""
        start = self._n_written
        self._n_written += len(batch_idxs)
        self._batch_idxs.append(batch_idxs)
        return self._rows[start : self._n_written]

    def in_batch_order(self) -> F32Array:
        """Return (n_outputs, n_vocab), row k for the k-th smallest batch index; read-only."""
        rows = self._rows[: self._n_written]
        if self._n_written > 1:
            order = np.concatenate(self._batch_idxs)
            if np.any(order[1:] < order[:-1]):
                rows = rows[np.argsort(order)]
        rows.flags.writeable = False
        return rows
