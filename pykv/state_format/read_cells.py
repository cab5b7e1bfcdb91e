"""Reads the cells that a state lists, and refuses those that no memory can have.

Source: spec state_format.md sections 3 and 6.
"""

from __future__ import annotations

import struct

import numpy as np

from pykv.errors import StateError
from pykv.state_format.cursor import Cursor, mismatch
from pykv.state_format.records import CellRecords
from pykv.typing import MAX_SEQ, I32Array

_U32 = struct.Struct("<I")

MAX_CELLS = 2**24
"""More than any memory has, where it is not known how many it has."""

_CHUNK = 1 << 14
"""Words that are made Python's numbers at once."""


def read_cells(cursor: Cursor, n_ids: int | None, *, has_ext: bool, what: str, n_max: int = MAX_CELLS) -> CellRecords:
    """Read a count and as many cells.

    Parameters
    ----------
    n_ids : how many ids each cell must have; None = as many as it says, up to `MAX_SEQ`.
    has_ext : whether x, y and token of each are listed.
    n_max : how many cells there may be.

    Raises
    ------
    StateError : the bytes end, or a cell has an impossible position, number of ids or id.
    """
    at = cursor.at
    n = cursor.u32(f"{what}: number of cells")
    n_fixed = 5 if has_ext else 2
    if n > n_max:
        raise mismatch(f"{what}: number of cells", f"at most {n_max}", n, at)
    if n * (n_fixed + (n_ids or 0)) * 4 > cursor.left:
        raise mismatch(f"{what}: number of cells", f"no more than {cursor.left} bytes can hold", n, at)
    start = cursor.at
    counts = _counts(cursor, n, n_fixed, what)
    words = cursor.words(n * n_fixed + int(counts.sum()), f"{what}: cells")
    cells = _cells(words, counts, n_fixed, start)
    _check(cells, n_ids, what)
    return cells


def _counts(cursor: Cursor, n: int, n_fixed: int, what: str) -> I32Array:
    """Return how many ids each cell has, (n,), without moving the cursor."""
    if not n:
        return np.empty(0, np.int32)
    first = _U32.unpack_from(cursor.data, cursor.at + 4)[0]
    if first <= MAX_SEQ and _all_have(cursor, n, n_fixed + first, first):
        return np.full(n, first, np.int32)
    return _counts_one_by_one(cursor, n, n_fixed, what)


def _all_have(cursor: Cursor, n: int, n_words: int, n_ids: int) -> bool:
    """Return whether all cells have this many ids, so that they are all of one length."""
    if n * n_words * 4 > cursor.left:
        return False
    words = np.frombuffer(cursor.data, "<i4", n * n_words, cursor.at)
    return bool((words[1::n_words] == n_ids).all())


def _counts_one_by_one(cursor: Cursor, n: int, n_fixed: int, what: str) -> I32Array:
    """Return the numbers of ids of cells of different lengths: where the next begins, only the last one tells."""
    counts: list[int] = []
    add = counts.append
    at = cursor.at + 4
    while len(counts) < n:
        n_words = min((cursor.stop - at) // 4, _CHUNK)
        if n_words < 1:
            end = min(at - 4, cursor.stop)
            raise mismatch(f"{what}: cell {len(counts)}", f"{4 * n_fixed} bytes", "the end before them", end)
        words = np.frombuffer(cursor.data, "<u4", n_words, at).tolist()
        i = 0
        while i < n_words:
            count = words[i]
            if count > MAX_SEQ:
                break
            add(count)
            i += n_fixed + count
        if i < n_words and len(counts) < n:
            what = f"{what}: number of ids of cell {len(counts)}"
            raise mismatch(what, f"at most {MAX_SEQ}", words[i], at + 4 * i)
        at += 4 * i
    return np.array(counts[:n], np.int32)  # the last chunk may go beyond the cells


def _cells(words: I32Array, counts: I32Array, n_fixed: int, start: int) -> CellRecords:
    n = len(counts)
    if n and (counts == counts[0]).all():
        table = words.reshape(n, -1)
        pos, ext, ids = table[:, 0].copy(), table[:, 2:5].copy(), table[:, n_fixed:].reshape(-1)
    else:
        before = np.arange(n) * n_fixed + np.cumsum(counts, dtype=np.int64) - counts
        fixed = before[:, None] + np.arange(n_fixed)
        is_id = np.ones(len(words), bool)
        is_id[fixed] = False
        pos, ext, ids = words[before], words[fixed[:, 2:]], words[is_id]
    return CellRecords(pos, counts, ids, ext if n_fixed == 5 else None, start)


def _check(cells: CellRecords, n_ids: int | None, what: str) -> None:
    """Refuse cells without a position, with another number of ids than asked for, or with impossible ids."""
    if n_ids is not None and (cells.n_ids != n_ids).any():
        i = int((cells.n_ids != n_ids).argmax())
        raise mismatch(f"{what}: number of ids of cell {i}", n_ids, cells.n_ids[i], cells.byte_of(i) + 4)
    if (cells.pos < 0).any():
        i = int((cells.pos < 0).argmax())
        raise mismatch(f"{what}: position of cell {i}", "0 or more", cells.pos[i], cells.byte_of(i))
    bad = (cells.ids < 0) | (cells.ids >= MAX_SEQ)
    if bad.any():
        raise bad_id(cells, int(bad.argmax()), f"0 to {MAX_SEQ - 1}", what)
    if len(cells.ids) > 1:
        owner = cells.cell_of_id
        falls = (np.diff(cells.ids) <= 0) & (owner[1:] == owner[:-1])
        if falls.any():
            i = int(falls.argmax())
            raise bad_id(cells, i + 1, f"more than {cells.ids[i]}, the id before it", what)


def bad_id(cells: CellRecords, i_id: int, expected: str, what: str) -> StateError:
    """Return the error for the id at an index of `cells.ids`."""
    before = np.cumsum(cells.n_ids)
    cell = int(np.searchsorted(before, i_id, side="right"))
    i_own = i_id - int(before[cell] - cells.n_ids[cell])
    at = cells.byte_of(cell) + 4 * (cells.n_fixed + i_own)
    return mismatch(f"{what}: sequence id {i_own} of cell {cell}", expected, cells.ids[i_id], at)
