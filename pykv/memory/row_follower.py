"""RowFollower: lets stored rows follow the bookkeeping, in every cache that stands on the same cells.

Source: spec kv_cache.md section 7; follows llama.cpp's ``llama_kv_cache::update``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from pykv.cells import CellStreams
from pykv.cells.row_copy import needed_copies
from pykv.errors import ComputeCancelled
from pykv.ggml import CancelFlag
from pykv.memory.kv_store import KVStore
from pykv.memory.row_mover import RowMover
from pykv.typing import I32Array, I64Array

GROUP = 16
"""Rows that move by one delta are turned together if there are so many on average: their sines are computed once."""


class RowFollower:
    """Carries out what the verbs have queued.

    Parameters
    ----------
    streams : the bookkeeping.
    stop : looked at between two steps; what is left then waits for the next `run`.
    """

    def __init__(self, streams: CellStreams, stop: CancelFlag) -> None:
        self._streams, self._stop = streams, stop
        self._movers: weakref.WeakKeyDictionary[RowMover, None] = weakref.WeakKeyDictionary()  # in order

    def join(self, mover: RowMover) -> None:
        """Let the rows of one more store follow."""
        self._movers[mover] = None

    def leave(self, mover: RowMover) -> None:
        """Move the rows of a store no more."""
        self._movers.pop(mover, None)

    @property
    def stores(self) -> tuple[KVStore, ...]:
        """The stores whose rows follow, in the order in which they joined."""
        return tuple(mover.store for mover in self._movers)

    @property
    def has_work(self) -> bool:
        """Whether something is queued."""
        return bool(self._streams.pending_copies) or self._streams.has_shift

    def run(self) -> None:
        """Copy the queued rows in order, then turn the keys of what has moved. Mutates K and V.

        Raises
        ------
        UnsupportedOpError, AllocError, ComputeError : a device cannot; what is left stays queued. Only a device that
            fails amid a computation leaves some layers of those rows turned and others not.
        ComputeCancelled : stopped; what is left stays queued.
        """
        queue, movers = self._streams.pending_copies, tuple(self._movers)
        queue[:] = needed_copies(queue, self._streams.cells)
        while queue:
            self._check_stop()
            for mover in movers:
                mover.copy(queue[0])
            del queue[0]
        rows, deltas = self._streams.moved_rows()
        for some, delta in in_groups(rows, deltas, min(mover.n_rows_at_once for mover in movers)):
            self._check_stop()
            _turn_all(movers, some, delta)
            self._streams.reset_shift(some)  # at once, so that none is turned twice if the next computation fails
        self._streams.reset_shift()

    def _check_stop(self) -> None:
        if self._stop:
            raise ComputeCancelled("stopped while rows were following their cells; the next update goes on from there")


def _turn_all(movers: Sequence[RowMover], rows: I64Array, deltas: I32Array) -> None:
    """Turn rows in all stores; if one of them fails, turn them back in those that are done."""
    done: list[RowMover] = []
    try:
        for mover in movers:
            mover.turn(rows, deltas)
            done.append(mover)
    except Exception:
        for mover in done:
            mover.turn(rows, -deltas)
        raise


def in_groups(rows: I64Array, deltas: I32Array, n_at_once: int) -> Iterator[tuple[I64Array, I32Array]]:
    """Yield (k,) rows, at most `n_at_once`, with (k,) deltas, or with (1,) that is the same for all of them."""
    if not rows.size:  # what moved is gone again
        return
    order = np.argsort(deltas, kind="stable")
    rows, deltas = rows[order], deltas[order]
    starts = np.flatnonzero(np.diff(deltas, prepend=deltas[:1] - 1)).tolist()
    if len(starts) * GROUP > rows.size:  # many small groups: one sine for each row is cheaper than one graph for each
        starts = [0]
    for start, stop in zip(starts, [*starts[1:], rows.size], strict=True):
        for at in range(start, stop, n_at_once):
            chunk = slice(at, min(at + n_at_once, stop))
            is_one = deltas[chunk.start] == deltas[chunk.stop - 1]
            yield rows[chunk], deltas[chunk][:1] if is_one else deltas[chunk]
