"""The cells that an operation is about: distinct, within bounds, and ready for indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pykv.batch.arrays import ends
from pykv.errors import ParamError
from pykv.typing import BoolArray, I64Array


class Picked(NamedTuple):
    """Distinct cells of one stream.

    Attributes
    ----------
    idxs : (k,) their indices, in the caller's order.
    at : the same as an index: a slice where they follow one another, which numpy serves ten times faster.
        Reading an array at a slice gives a view.
    first, last : the smallest and the largest index; 0 and -1 without cells.
    """

    idxs: I64Array
    at: slice | I64Array
    first: int
    last: int

    @property
    def n(self) -> int:
        """Number of cells."""
        return self.idxs.size

    def where(self, flags: BoolArray) -> Picked:
        """Return those of the cells whose flag is set."""
        n = np.count_nonzero(flags)
        if n == self.idxs.size:
            return self
        return _indexed(self.idxs[flags]) if n else NOTHING


Cells = int | Sequence[int] | I64Array | Picked
"""One cell index, or several distinct ones in any order; or such as have been checked already."""

NOTHING = Picked(np.empty(0, np.int64), slice(0, 0), 0, -1)


def pick(idxs: Cells, n: int) -> Picked:
    """Check cells of a stream of `n`.

    Raises
    ------
    ParamError
        If a cell is not in the stream, or named twice.
    """
    if isinstance(idxs, Picked):
        picked = idxs
    else:
        arr = np.asarray(idxs, np.int64)
        if arr.size == 0:
            return NOTHING
        picked = _indexed(arr if arr.ndim else arr.reshape(1))
    if picked.first < 0 or picked.last >= n:
        raise ParamError(f"idxs: cell {picked.first if picked.first < 0 else picked.last} is outside 0 to {n - 1}")
    return picked


def _indexed(arr: I64Array) -> Picked:
    """Look for a run in at least one cell; raises ParamError if one is named twice."""
    first, n = arr.item(0), arr.size
    if n == 1:  # the decode path
        return Picked(arr, slice(first, first + 1), first, first)
    last = arr.item(-1)
    if np.count_nonzero(arr[1:] > arr[:-1]) == n - 1:
        return Picked(arr, slice(first, last + 1) if last - first == n - 1 else arr, first, last)
    if np.unique(arr).size != n:
        raise ParamError(f"idxs: {arr} names a cell twice")
    return Picked(arr, arr, *ends(arr))
