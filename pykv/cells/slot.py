"""Choose the cells for one ubatch. Never changes anything.

The search walks the ring of cells from a head and takes those that are free or have left the window.
Source: spec kv_cache.md section 2; follows llama.cpp's ``llama_kv_cache::find_slot``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykv.batch.arrays import ends
from pykv.batch.ubatch import UBatch
from pykv.cells.kv_cells import KVCells
from pykv.cells.window import SwaType, Window
from pykv.errors import BatchError
from pykv.typing import NO_POS, BoolArray, I64Array

if TYPE_CHECKING:
    from pykv.cells.stream_table import StreamTable


@dataclass(frozen=True, eq=False)
class SlotInfo:
    """The cells chosen for one ubatch.

    Attributes
    ----------
    s0, s1 : first and last stream involved.
    streams : the streams, in ubatch order.
    idxs : (n_streams, n) cell of each token within its stream, in token order.
    """

    s0: int
    s1: int
    streams: tuple[int, ...]
    idxs: I64Array

    @property
    def n_tokens(self) -> int:
        """Tokens that the slot holds, over all its streams."""
        return self.idxs.size

    @property
    def n_stream(self) -> int:
        """Streams from `s0` to `s1`: the outer dimension of the K and V views."""
        return self.s1 - self.s0 + 1


def find_slot(streams: StreamTable, ubatch: UBatch, cont: bool = False) -> SlotInfo | None:
    """Find cells for every token of `ubatch`; None if they do not fit. Does not modify `streams`.

    With several streams each sequence of the ubatch gets the same number of cells in its own stream. With `cont`
    they are consecutive.

    Raises
    ------
    BatchError
        If tokens of several streams are not laid out sequence by sequence, with one id each.
    """
    if streams.n_stream == 1:
        found = find_cells(streams.cells[0], streams.heads[0], ubatch.n_tokens, streams.window, cont)
        return None if found is None else SlotInfo(0, 0, (0,), found.reshape(1, -1))
    ids = _streams_of(streams, ubatch)
    n = ubatch.n_tokens // len(ids)
    rows = []
    for i in ids:
        found = find_cells(streams.cells[i], streams.heads[i], n, streams.window, cont)
        if found is None:
            return None
        rows.append(found)
    return SlotInfo(min(ids), max(ids), ids, np.stack(rows))


def find_cells(cells: KVCells, head: int, n: int, window: Window, cont: bool) -> I64Array | None:
    """Find `n` cells of one stream, from `head` on around the ring; None if they do not fit."""
    if n > cells.n:
        return None
    if head > cells.n_used + cells.n_gone + 2 * n:
        head = 0  # many holes behind: better filled than passed over
    end = head + n
    if end <= cells.n and (
        ends(cells.pos[head:end])[1] == NO_POS or np.count_nonzero(usable(cells, head, end, window)) == n
    ):
        return np.arange(head, end)
    if window.type is SwaType.NONE and cells.n_used + n > cells.n:
        return None
    free = usable(cells, 0, cells.n, window)
    return _first_run(free, head, n) if cont else _first_cells(free, head, n)


def usable(cells: KVCells, start: int, end: int, window: Window) -> BoolArray:
    """Tell which cells of ``[start, end)`` may be written.

    Those are the empty ones, and those that the window hides from the next token of every owner.
    """
    # differs from llama.cpp: there a cell of several owners is kept for good, so that after some forks of a
    # conversation a window cache is full of tokens that nobody sees
    pos = cells.pos[start:end]
    free: BoolArray = pos == NO_POS
    if window.type is SwaType.NONE or np.count_nonzero(free) == free.size:
        return free
    hidden: BoolArray = cells.n_owners[start:end] > 0
    for s in cells.sequences():
        own = cells.member(s)[start:end]
        if np.count_nonzero(own):
            hidden &= ~own | window.masked(pos, cells.pos_max(s) + 1)
    return free | hidden


def _first_cells(free: BoolArray, head: int, n: int) -> I64Array | None:
    after: I64Array = np.flatnonzero(free[head:])[:n] + head
    if after.size == n:
        return after
    before = np.flatnonzero(free[:head])[: n - after.size]
    found: I64Array = np.concatenate((after, before))
    return found if found.size == n else None


def _first_run(free: BoolArray, head: int, n: int) -> I64Array | None:
    """Return the first `n` consecutive free cells that start at `head` or later, else the first of all."""
    seen = np.concatenate(([0], np.cumsum(free)))
    starts = np.flatnonzero(seen[n:] - seen[:-n] == n)
    if starts.size == 0:
        return None
    ahead = starts[starts >= head]
    start = int(ahead[0] if ahead.size else starts[0])
    return np.arange(start, start + n)


def _streams_of(streams: StreamTable, ubatch: UBatch) -> tuple[int, ...]:
    """Return the stream of each sequence, in ubatch order."""
    ids = tuple(map(streams.stream_of, ubatch.seq_id_unq))
    n, rest = divmod(ubatch.n_tokens, len(ids))
    if rest:
        raise BatchError(f"ubatch: {ubatch.n_tokens} tokens do not divide among {len(ids)} sequences")
    for k, s in enumerate(ubatch.seq_id_unq):
        if ubatch.seq_ids[k * n] != (s,):
            raise BatchError(
                f"ubatch: token {k * n} has sequence ids {ubatch.seq_ids[k * n]}, expected only {s}: "
                "a token lives in one stream",
                seq_id=s,
            )
    return ids
