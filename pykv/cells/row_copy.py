"""RowCopy: stored rows that have yet to follow their cells.

A verb moves bookkeeping at once and leaves behind which rows are to be copied; the copies are carried out in
order before anything reads the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykv.cells.kv_cells import KVCells
from pykv.typing import NO_POS, I64Array


@dataclass(frozen=True, eq=False)
class RowCopy:
    """Rows to be copied from cells of one stream to cells of the same or another one.

    Attributes
    ----------
    src_stream, dst_stream : the streams.
    src, dst : (k,) cells; none of them is in both if the streams are the same.
    """

    src_stream: int
    dst_stream: int
    src: I64Array
    dst: I64Array


def needed_copies(copies: Sequence[RowCopy], streams: Sequence[KVCells]) -> list[RowCopy]:
    """Return the part of the copies, in order, whose rows some occupied cell will hold in the end."""
    wanted = [cells.pos != NO_POS for cells in streams]
    needed = []
    for copy in reversed(copies):
        keep = wanted[copy.dst_stream][copy.dst]
        if keep.any():
            part = RowCopy(copy.src_stream, copy.dst_stream, copy.src[keep], copy.dst[keep])
            wanted[part.dst_stream][part.dst] = False  # whatever was there before is written over
            wanted[part.src_stream][part.src] = True
            needed.append(part)
    return needed[::-1]
