"""What a state file says, parsed: cells and where their rows lie. Holds no payload.

A *section* is what one KV cache or one recurrent memory wrote; a *state* is one section a part of the memory, in the
order of its parts. Source: spec state_format.md sections 2, 3 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pykv.typing import I32Array, I64Array


class Span(NamedTuple):
    """Bytes of the source, from `start` on."""

    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class CellRecords:
    """The cells of one stream, in the order of their rows.

    Attributes
    ----------
    pos : (n,) positions.
    n_ids : (n,) how many sequences each belongs to.
    ids : (sum of n_ids,) these, cell by cell, ascending within a cell.
    ext : (n, 3) x, y and token, where the memory stores them; None = not stored.
    start : byte of the source where the first of them lies; 0 for cells that were not read.
    """

    pos: I32Array
    n_ids: I32Array
    ids: I32Array
    ext: I32Array | None = None
    start: int = 0

    @property
    def n(self) -> int:
        return len(self.pos)

    @property
    def n_fixed(self) -> int:
        """Words of a cell besides its ids."""
        return 2 if self.ext is None else 5

    @property
    def end(self) -> int:
        """The byte behind the last of them."""
        return self.start + 4 * (self.n * self.n_fixed + len(self.ids))

    @property
    def cell_of_id(self) -> I64Array:
        """(len(ids),) the cell that each of `ids` stands at."""
        return np.repeat(np.arange(self.n), self.n_ids)

    def byte_of(self, i: int) -> int:
        """Return where cell `i` lies in the source."""
        return self.start + 4 * (i * self.n_fixed + int(self.n_ids[:i].sum()))


@dataclass(frozen=True)
class RowsRecord:
    """The rows of one tensor, one for each cell.

    Attributes
    ----------
    dtype : ggml's number of the element type.
    row_bytes : bytes of one cell's row.
    by_channel : all cells of channel 0, then all of channel 1, and so on; else cell by cell.
    elem_bytes : bytes of an element, of rows by channel; else 0.
    span : the payload.
    """

    dtype: int
    row_bytes: int
    span: Span
    by_channel: bool = False
    elem_bytes: int = 0


@dataclass(frozen=True, eq=False)
class StreamRecords:
    """One stream of a KV section.

    Attributes
    ----------
    k, v : per tensor of the cache, in its order; fewer in `v` where V is a view of K. Empty where there are no cells.
    v_trans : whether V is stored by channel; None where there are no cells.
    rot : widths by which K and V were rotated; None where the dialect does not say, or there are no cells.
    """

    cells: CellRecords
    k: tuple[RowsRecord, ...] = ()
    v: tuple[RowsRecord, ...] = ()
    v_trans: bool | None = None
    rot: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class KVSection:
    """What one KV cache wrote."""

    streams: tuple[StreamRecords, ...]
    span: Span


@dataclass(frozen=True, eq=False)
class StatesSection:
    """What one recurrent memory wrote: `r` and `s` per layer that has them, in order; `n_layer` of the whole model."""

    cells: CellRecords
    n_layer: int
    r: tuple[RowsRecord, ...]
    s: tuple[RowsRecord, ...]
    span: Span


Section = KVSection | StatesSection
