"""Cells of two states that stand for the same token: the same position of the same sequence, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pykv.runtime.states.read_state import cells_of
from pykv.state_format import CellRecords, Section
from pykv.typing import MAX_SEQ, I64Array

NOBODY = -1
"""The sequence of cells that belong to none."""

_NTH_BITS, _POS_BITS = 24, 31
assert MAX_SEQ < 2 ** (64 - _NTH_BITS - _POS_BITS), "a key of 64 bits must hold a sequence, a position and a count"


class Run(NamedTuple):
    """Positions of one sequence, `stop` not included."""

    seq_id: int
    start: int
    stop: int


class Pairs(NamedTuple):
    """Rows of a stream of one state, and the rows of a stream of the other that they are compared with: both (k,)."""

    streams: tuple[int, int]
    rows: tuple[I64Array, I64Array]


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of a section lie.

    Attributes
    ----------
    key : (m,) ascending, of sequence, position, and which of several such tokens it is.
    stream, row : (m,) where it lies. Of a cell of several sequences, there are several tokens.
    ext : (m, 3), zeros where the state has none.
    """

    key: NDArray[np.uint64]
    stream: I64Array
    row: I64Array
    ext: NDArray[np.int32]

    @property
    def n_cells(self) -> int:
        """How many cells they are in."""
        return int(np.unique(self.stream << _NTH_BITS | self.row).size)


@dataclass(frozen=True, eq=False)
class Matched:
    """Tokens of one section of two states.

    Attributes
    ----------
    only : which one lacks in the other.
    n_both : tokens that both have.
    n_ext_differ : those of them with another x, y or token noted.
    pairs : the rows of these tokens, each pair of rows once.
    """

    only: tuple[list[Run], list[Run]]
    n_both: int
    n_ext_differ: int
    pairs: list[Pairs]


def places(section: Section, *, is_whole: bool, only: int | None) -> Places:
    """Return the tokens of a section.

    Parameters
    ----------
    is_whole : whether cells say whose they are; else all are one sequence's, counted as 0.
    only : the one sequence that is looked at, counted as 0 too.
    """
    tokens = [_tokens(s, cells, is_whole, only) for s, cells in enumerate(cells_of(section))]
    seq, pos, stream, row = (np.concatenate([one[i] for one in tokens]) for i in range(4))
    ext = np.concatenate([one[4] for one in tokens])
    order = np.lexsort((row, stream, ext[:, 0], ext[:, 1], pos, seq))
    seq, pos, stream, row, ext = seq[order], pos[order], stream[order], row[order], ext[order]
    key = (seq + 1) << _POS_BITS | pos
    n = np.arange(key.size)
    is_first = np.ones(key.size, np.bool_)
    is_first[1:] = key[1:] != key[:-1]
    nth = n - np.maximum.accumulate(np.where(is_first, n, 0))
    return Places(key.astype(np.uint64) << np.uint64(_NTH_BITS) | nth.astype(np.uint64), stream, row, ext)


def match(first: Places, second: Places) -> Matched:
    """Find the tokens that both have."""
    _, at_first, at_second = np.intersect1d(first.key, second.key, assume_unique=True, return_indices=True)
    only = (_runs(np.delete(first.key, at_first)), _runs(np.delete(second.key, at_second)))
    n_ext_differ = int((first.ext[at_first] != second.ext[at_second]).any(axis=1).sum())
    columns = first.stream[at_first], second.stream[at_second], first.row[at_first], second.row[at_second]
    table = np.unique(np.stack(columns, axis=1), axis=0)
    return Matched(only, at_first.size, n_ext_differ, list(_pairs(table)))


def _tokens(
    stream: int, cells: CellRecords, is_whole: bool, only: int | None
) -> tuple[I64Array, I64Array, I64Array, I64Array, NDArray[np.int32]]:
    """Return sequence, position, stream, row and ext of each token in a stream."""
    if is_whole:
        free = np.flatnonzero(cells.n_ids == 0)
        row = np.concatenate([cells.cell_of_id, free])
        seq = np.concatenate([cells.ids.astype(np.int64), np.full(free.size, NOBODY)])
        if only is not None:
            row = row[seq == only]
            seq = np.zeros(row.size, np.int64)
    else:
        row, seq = np.arange(cells.n), np.zeros(cells.n, np.int64)
    ext = np.zeros((row.size, 3), np.int32) if cells.ext is None else cells.ext[row]
    return seq, cells.pos[row].astype(np.int64), np.full(row.size, stream), row, ext


def _runs(key: NDArray[np.uint64]) -> list[Run]:
    """Return the sequences and positions in keys, neighbours together."""
    both = np.unique(key >> np.uint64(_NTH_BITS)).astype(np.int64)
    if not both.size:
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(both) != 1) + 1))
    stops = np.append(starts[1:], both.size) - 1
    mask = (1 << _POS_BITS) - 1
    return [
        Run(int(both[a] >> _POS_BITS) - 1, int(both[a] & mask), int(both[b] & mask) + 1)
        for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
    ]


def _pairs(table: I64Array) -> Iterator[Pairs]:
    """Yield the rows of each two streams from (k, 4), which ascends."""
    if not len(table):
        return
    ends = np.append(np.flatnonzero((np.diff(table[:, :2], axis=0) != 0).any(axis=1)) + 1, len(table))
    start = 0
    for stop in ends.tolist():
        part = table[start:stop]
        yield Pairs((int(part[0, 0]), int(part[0, 1])), (part[:, 2].copy(), part[:, 3].copy()))
        start = stop
