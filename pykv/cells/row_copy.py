"""RowCopy: stored rows that have yet to follow their cells.

A verb moves bookkeeping at once and leaves behind which rows are to be copied; the copies are carried out in
order before anything reads the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pykv.cells.kv_cells import KVCells
from pykv.typing import NO_POS, I64Array


@dataclass(frozen=True, eq=False)
class RowCopy:
    """Rows to be copied from cells of one stream to cells of the same or another one.

    Attributes
    ----------
    src_stream, dst_stream : the streams.
    src, dst : (k,) cells; all are read before one of them is written.
    """

    src_stream: int
    dst_stream: int
    src: I64Array
    dst: I64Array


def needed_copies(copies: Sequence[RowCopy], streams: Sequence[KVCells]) -> list[RowCopy]:
    """Return the part of the copies, in order, whose rows some occupied cell will hold in the end.

    Few large ones in place of many small ones, where that is the same.
    """
    wanted = [cells.pos != NO_POS for cells in streams]
    needed = []
    for copy in reversed(copies):
        keep = wanted[copy.dst_stream][copy.dst]
        if keep.any():
            part = RowCopy(copy.src_stream, copy.dst_stream, copy.src[keep], copy.dst[keep])
            wanted[part.dst_stream][part.dst] = False  # whatever was there before is written over
            wanted[part.src_stream][part.src] = True
            needed.append(part)
    return list(_joined(needed[::-1], streams))


def _joined(copies: Sequence[RowCopy], streams: Sequence[KVCells]) -> Iterator[RowCopy]:
    """Yield neighbours between the same streams as one, as long as none reads what another one has written."""
    group: list[RowCopy] = []
    written = np.zeros(streams[0].n, np.bool_)
    for copy in copies:
        same = group and (group[0].src_stream, group[0].dst_stream) == (copy.src_stream, copy.dst_stream)
        reads_written = copy.src_stream == copy.dst_stream and written[copy.src].any()
        if group and (not same or reads_written):
            yield _join(group)
            group, written = [], np.zeros(streams[0].n, np.bool_)
        group.append(copy)
        written[copy.dst] = True
    if group:
        yield _join(group)


def _join(group: Sequence[RowCopy]) -> RowCopy:
    if len(group) == 1:
        return group[0]
    src, dst = (np.concatenate([getattr(copy, end) for copy in group]) for end in ("src", "dst"))
    return RowCopy(group[0].src_stream, group[0].dst_stream, src, dst)
