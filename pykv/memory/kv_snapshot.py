"""What a snapshot holds of a KV cache: copies of the rows in a window, or the knowledge of what a cut must leave."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pykv.cells import SwaType
from pykv.cells.kept_cells import History, KeptCells, Search
from pykv.errors import ParamError
from pykv.memory.kv_store import KVStore
from pykv.memory.saved_rows import RowsOf, saved
from pykv.memory.snapshot import Piece, Write
from pykv.typing import I64Array

if TYPE_CHECKING:
    from pykv.memory.kv_cache import KVCache


def take(cache: KVCache, seq_id: int, position: int, on: str) -> Piece:
    """Return what `cache` has to keep of a sequence that ends before `position`."""
    if cache.other is not None:
        return LentPiece()
    if cache.streams.window.type is SwaType.NONE:
        return HistoryPiece(cache, seq_id, position)
    return WindowPiece(cache, seq_id, position, on)


def layout(cache: KVCache) -> object:
    """Return what a cache stores, in a form to compare."""
    stored = [
        (store.plan.settings.tag, il, k.dtype, k.ne[0], v and (v.dtype, v.ne[0]))
        for store in cache.stores
        for il, k, v in store.own_tensors()
    ]
    return (cache.other is None, cache.spec, cache.streams.window, tuple(stored))


class LentPiece:
    """Nothing: the cells belong to another cache, whose snapshot holds the rows of both."""

    nbytes = 0

    def check(self, cache: KVCache, seq_id: int) -> None:
        """See `Piece.check`."""

    def place(self, cache: KVCache, seq_id: int) -> Write:
        """Leave the cells alone, as all verbs of such a cache do."""
        return lambda: None

    def close(self) -> None:
        """See `Piece.close`."""


class HistoryPiece:
    """Of a cache without a window: what must still be there, and not moved, when all behind it is cut off."""

    nbytes = 0

    def __init__(self, cache: KVCache, seq_id: int, position: int) -> None:
        streams = cache.streams
        stream = streams.stream_of(seq_id)
        self._history = History.of(streams.cells[stream], seq_id, position)
        self._search = Search.of(streams, stream)
        self._position, self._at, self._home = position, streams.n_changes, weakref.ref(streams)

    def check(self, cache: KVCache, seq_id: int) -> None:
        """See `Piece.check`."""
        streams = cache.streams
        now = History.of(streams.cells[streams.stream_of(seq_id)], seq_id, self._position)
        gone = self._history.gone_from(now)
        if gone is not None:
            raise ParamError(f"snapshot: below its position {self._position}, sequence {seq_id} {gone}")
        since = self._at if self._home() is streams else -1
        if cache.moved_at(seq_id) > since:
            raise ParamError(f"snapshot: positions of sequence {seq_id} have been moved since it was taken")

    def place(self, cache: KVCache, seq_id: int) -> Write:
        """See `Piece.place`."""
        streams = cache.streams
        streams.seq_rm(seq_id, self._position)
        self._search.repeat(streams, streams.stream_of(seq_id))
        return lambda: None

    def close(self) -> None:
        """See `Piece.close`."""


class WindowPiece:
    """Of a cache with a window: the cells that a next token sees, with their rows in every cache on these cells."""

    def __init__(self, cache: KVCache, seq_id: int, position: int, on: str) -> None:
        streams, (first, _) = cache.streams, cache.spec.window.span(position)
        self._kept = KeptCells.of(streams, seq_id, first)
        self._rows = saved(_rows_of(cache.stores, self._rows_at(cache, seq_id, self._kept.idxs)), on)

    @property
    def nbytes(self) -> int:
        """Bytes of the copied rows."""
        return self._rows.nbytes

    def check(self, cache: KVCache, seq_id: int) -> None:
        """Require nothing: all that a next token sees is here."""

    def place(self, cache: KVCache, seq_id: int) -> Write:
        """See `Piece.place`."""
        at = self._kept.put_into(cache.streams, seq_id)
        targets = _rows_of(cache.stores, self._rows_at(cache, seq_id, at))
        return lambda: self._rows.write_to(targets)

    def close(self) -> None:
        """See `Piece.close`."""
        self._rows.close()

    @staticmethod
    def _rows_at(cache: KVCache, seq_id: int, idxs: I64Array) -> I64Array:
        return idxs + cache.streams.stream_of(seq_id) * cache.n_cells


def _rows_of(stores: Sequence[KVStore], rows: I64Array) -> list[RowsOf]:
    """Return these rows of K and V in every tensor that belongs to the stores."""
    found: list[RowsOf] = []
    for store in stores:
        for layer, (_, k, v) in zip(store.plan.layers, store.own_tensors(), strict=True):
            found.append(RowsOf(k, rows, layer.buffer_type))
            if v is not None:
                found.append(RowsOf(v, rows, layer.buffer_type, store.v_trans))
    return found
