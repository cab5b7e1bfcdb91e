"""The bytes of a state, all but its payload: heads, between which a writer puts the rows of tensors.

A stream of a KV section is `first`, then for each tensor, K's before V's, the head in `rows` and its payload. A states
section is the same with R's before S's. Source: spec state_format.md sections 3 and 6.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from pykv.state_format.dialect import NEWEST, Dialect
from pykv.state_format.layout import KVLayout, RowsLayout, StatesLayout
from pykv.state_format.records import CellRecords


class Heads(NamedTuple):
    """What stands before the payloads.

    Attributes
    ----------
    first : the count of cells, the cells, and what is said of all rows; comes before `rows`.
    rows : one for each tensor, followed by its payload; none for a KV stream without cells.
    """

    first: bytes
    rows: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return len(self.first) + sum(map(len, self.rows))


def kv_section_head(n_stream: int) -> bytes:
    """Return what comes before the first stream of a KV section."""
    return struct.pack("<I", n_stream)


def kv_stream_heads(cells: CellRecords, layout: KVLayout, dialect: Dialect = NEWEST) -> Heads:
    """Return the heads of one stream: of the tensors in `layout.k`, then of those in `layout.v`.

    A stream without cells is its count and nothing else: no payload follows.
    """
    if (cells.ext is not None) is not layout.has_ext and cells.n:
        raise ValueError(f"cells with ext {cells.ext is not None} for a layout with has_ext {layout.has_ext}")
    if not cells.n:
        return Heads(struct.pack("<I", 0), ())
    said = struct.pack("<II", layout.v_trans, len(layout.k))
    if dialect.says_rotation:
        said += struct.pack("<II", *layout.rot)
    k = tuple(_row_head(rows) for rows in layout.k)
    v = tuple((_channel_head if layout.v_trans else _row_head)(rows) for rows in layout.v)
    return Heads(_counted_cells(cells) + said, k + v)


def states_heads(cells: CellRecords, layout: StatesLayout) -> Heads:
    """Return the heads of a states section: of the tensors in `layout.r`, then of those in `layout.s`.

    All heads are there, and payloads of no bytes between them, even where there are no cells.
    """
    said = struct.pack("<II", 0, layout.n_layer)
    return Heads(_counted_cells(cells) + said, tuple(_row_head(rows) for rows in layout.r + layout.s))


def _counted_cells(cells: CellRecords) -> bytes:
    return struct.pack("<I", cells.n) + encode_cells(cells)


def encode_cells(cells: CellRecords) -> bytes:
    """Return the cells as a state lists them: position, number of ids, ext if there is one, ids."""
    n_fixed = 2 if cells.ext is None else 5
    if len(cells.n_ids) != cells.n or int(cells.n_ids.sum()) != len(cells.ids):
        raise ValueError(f"{cells.n} cells with {len(cells.n_ids)} counts of ids and {len(cells.ids)} ids")
    words = np.empty(cells.n * n_fixed + len(cells.ids), "<i4")
    before = np.arange(cells.n) * n_fixed + np.cumsum(cells.n_ids, dtype=np.int64) - cells.n_ids
    words[before] = cells.pos
    words[before + 1] = cells.n_ids
    fixed = before[:, None] + np.arange(n_fixed)
    if cells.ext is not None:
        words[fixed[:, 2:]] = cells.ext
    is_id = np.ones(len(words), bool)
    is_id[fixed] = False
    words[is_id] = cells.ids
    return words.tobytes()


def _row_head(rows: RowsLayout) -> bytes:
    return struct.pack("<iQ", rows.dtype, rows.row_bytes)


def _channel_head(rows: RowsLayout) -> bytes:
    return struct.pack("<iII", rows.dtype, rows.elem_bytes, rows.row_bytes // rows.elem_bytes)
