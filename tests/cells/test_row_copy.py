"""Which of the queued copies are still needed, given the cells that are occupied in the end."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pykv.cells import KVCells, RowCopy
from pykv.cells.row_copy import needed_copies

Plain = tuple[int, int, list[int], list[int]]

N_CELLS = 5


def occupied(*streams: Iterable[int]) -> list[KVCells]:
    made = []
    for used in streams:
        cells = KVCells(N_CELLS)
        for i in used:
            cells.pos_set(i, i)
            cells.seq_add(i, 0)
        made.append(cells)
    return made


def needed(copies: list[Plain], streams: list[KVCells]) -> list[Plain]:
    queue = [RowCopy(s0, s1, np.array(src), np.array(dst)) for s0, s1, src, dst in copies]
    return [(c.src_stream, c.dst_stream, c.src.tolist(), c.dst.tolist()) for c in needed_copies(queue, streams)]


def test_a_copy_to_occupied_cells_is_needed_whole() -> None:
    assert needed([(0, 1, [0, 1], [3, 2])], occupied([], [2, 3])) == [(0, 1, [0, 1], [3, 2])]
    assert needed([], occupied([0])) == []


def test_rows_of_cells_that_are_empty_again_are_left_out() -> None:
    assert needed([(0, 1, [0, 1, 2], [0, 1, 2])], occupied([0, 1, 2], [1])) == [(0, 1, [1], [1])]
    assert needed([(0, 1, [0, 1], [0, 1])], occupied([0, 1], [4])) == []


def test_what_a_later_copy_writes_over_is_left_out() -> None:
    copies = [(0, 1, [0, 1], [0, 1]), (2, 1, [3], [0])]
    assert needed(copies, occupied([0, 1], [0, 1], [3])) == [(0, 1, [1], [1]), (2, 1, [3], [0])]


def test_a_chain_is_needed_although_its_middle_is_empty() -> None:
    copies = [(0, 1, [0, 1], [2, 3]), (1, 2, [2], [4])]
    assert needed(copies, occupied([], [], [4])) == [(0, 1, [0], [2]), (1, 2, [2], [4])]


def test_a_chain_to_nowhere_is_left_out_whole() -> None:
    assert needed([(0, 1, [0], [2]), (1, 2, [2], [4]), (2, 0, [4], [3])], occupied([0], [], [])) == []


def test_a_row_that_is_read_before_it_is_written_over_is_needed_twice() -> None:
    copies = [(0, 0, [0], [1]), (0, 0, [1], [2]), (0, 0, [3], [1])]
    assert needed(copies, occupied([1, 2])) == [copies[0], (0, 0, [1, 3], [2, 1])]
    assert needed(copies, occupied([1])) == copies[2:]
    assert needed(copies, occupied([2])) == copies[:2]


def test_hundreds_of_small_copies_went_through_the_whole_cache_each() -> None:
    """Neighbours become one copy, as long as none reads what another one has written."""
    singles = [(0, 0, [i], [i + 2]) for i in range(2)]
    assert needed(singles, occupied([2, 3])) == [(0, 0, [0, 1], [2, 3])]
    chain = [(0, 0, [0], [1]), (0, 0, [1], [2])]
    assert needed(chain, occupied([1, 2])) == chain
    across = [(0, 1, [0], [0]), (0, 0, [0], [1])]
    assert needed(across, [*occupied([0, 1]), *occupied([0])]) == across


def test_the_given_copies_stay_as_they_were() -> None:
    copy = RowCopy(0, 0, np.array([0, 1]), np.array([2, 3]))
    queue = [copy]
    needed_copies(queue, occupied([3]))
    assert queue == [copy]
    assert (copy.src.tolist(), copy.dst.tolist()) == ([0, 1], [2, 3])


ROWS = [(stream, cell) for stream in range(2) for cell in range(N_CELLS)]


@st.composite
def copy_lists(draw: st.DrawFn) -> list[Plain]:
    copies = []
    for _ in range(draw(st.integers(0, 6))):
        s0, s1 = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        n = draw(st.integers(1, N_CELLS // 2))
        cells = draw(st.permutations(range(N_CELLS)))
        others = cells if s0 == s1 else draw(st.permutations(range(N_CELLS)))
        copies.append((s0, s1, list(cells[:n]), list(others[-n:])))
    return copies


def carried_out(copies: list[Plain]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return what each row holds in the end, named by the row where it was in the beginning."""
    rows = {row: row for row in ROWS}
    for s0, s1, src, dst in copies:
        for i, j in zip(src, dst, strict=True):
            rows[s1, j] = rows[s0, i]
    return rows


@given(copies=copy_lists(), used=st.sets(st.sampled_from(ROWS)))
def test_what_is_needed_fills_occupied_cells_as_all_copies_would(
    copies: list[Plain], used: set[tuple[int, int]]
) -> None:
    streams = occupied(*([cell for stream, cell in sorted(used) if stream == s] for s in range(2)))
    kept = needed(copies, streams)
    before, after = carried_out(copies), carried_out(kept)
    assert {row: after[row] for row in used} == {row: before[row] for row in used}
    for k, (s0, s1, src, dst) in enumerate(kept):
        for pair in zip(src, dst, strict=True):
            spared = [c if i != k else (s0, s1, *without(src, dst, pair)) for i, c in enumerate(kept)]
            ends = carried_out(spared)
            same_anyway = before_copy(kept, k, s0, pair[0]) == before_copy(kept, k, s1, pair[1])
            assert same_anyway or any(ends[row] != after[row] for row in used), "a row is copied for nothing"


def without(src: list[int], dst: list[int], pair: tuple[int, int]) -> tuple[list[int], list[int]]:
    left = [p for p in zip(src, dst, strict=True) if p != pair]
    return [i for i, _ in left], [j for _, j in left]


def before_copy(copies: list[Plain], k: int, stream: int, cell: int) -> tuple[int, int]:
    """Return what a row holds when copy `k` is about to be carried out."""
    return carried_out(copies[:k])[stream, cell]
