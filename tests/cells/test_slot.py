"""Slot search: the specification's examples (kv_cache.md section 2), both modes against the plain-Python walk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.naive_cells import NaiveStreams
from support.ubatches import run, ubatch

from pykv.cells import NO_WINDOW, CellStreams, KVCells, SlotInfo, SwaType, Window, element_indices, row_indices
from pykv.errors import BatchError, SequenceError


def occupied(n: int, used: list[int], head: int, window: Window = NO_WINDOW) -> CellStreams:
    """Return a stream where `used` cells hold positions 0, 1, ... of sequence 0."""
    streams = CellStreams(n, window=window)
    streams.cells[0].pos_set(used, np.arange(len(used), dtype=np.int32))
    streams.cells[0].seq_add(used, 0)
    streams.heads[0] = head
    return streams


@pytest.mark.parametrize(
    ("used", "head", "n", "expected"),
    [
        ([0, 1, 2, 5], 6, 3, [6, 7, 3]),
        ([0, 1, 2, 5], 6, 5, None),
        ([7], 8, 3, [0, 1, 2]),
        ([0, 1, 2, 5], 3, 2, [3, 4]),
        ([0, 1, 2, 5], 3, 3, [3, 4, 6]),
        ([], 0, 8, list(range(8))),
        ([], 0, 9, None),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, 1, None),
        ([0, 1, 2, 3, 4, 5, 6], 0, 1, [7]),
        ([0], 3, 1, [3]),
        ([0], 4, 1, [1]),
    ],
)
def test_cells_are_taken_from_the_head_around_the_ring(
    used: list[int], head: int, n: int, expected: list[int] | None
) -> None:
    streams = occupied(8, used, head)
    slot = streams.find_slot(run(0, 20, 20 + n))
    assert (slot and slot.idxs.tolist()) == (expected and [expected])
    assert streams.heads == [head]


def test_the_head_moves_behind_the_last_cell_taken() -> None:
    streams = occupied(8, [0, 1, 2, 5], 6)
    ub = run(0, 4, 7)
    slot = streams.find_slot(ub)
    assert slot is not None
    streams.apply(slot, ub)
    assert streams.heads == [4]
    assert streams.dump() == "0:0{0} 1:1{0} 2:2{0} 3:6{0} 4:. 5:3{0} 6:4{0} 7:5{0}"


def test_cells_that_left_the_window_are_taken_again() -> None:
    streams = occupied(4, [0, 1, 2, 3], 4, Window(2, SwaType.STANDARD))
    slot = streams.find_slot(run(0, 4, 6))
    assert slot is not None
    assert slot.idxs.tolist() == [[0, 1]]
    assert streams.find_slot(run(0, 4, 8)) is None


def test_a_shared_cell_is_not_taken_again_whatever_the_window() -> None:
    streams = occupied(4, [0, 1, 2, 3], 4, Window(2, SwaType.STANDARD))
    streams.seq_cp(0, 1, 0, 1)
    slot = streams.find_slot(run(0, 4, 5))
    assert slot is not None
    assert slot.idxs.tolist() == [[1]]


@pytest.mark.parametrize(
    ("used", "head", "n", "expected"),
    [
        ([0, 1, 2, 5], 6, 2, [6, 7]),
        ([0, 1, 2, 5], 6, 3, None),
        ([2, 5], 3, 3, None),
        ([0, 1, 2, 5], 5, 2, [6, 7]),
        ([3, 7], 4, 3, [4, 5, 6]),
        ([3, 6], 5, 3, [0, 1, 2]),
        ([6, 7], 1, 6, [0, 1, 2, 3, 4, 5]),
        ([3, 4], 2, 4, None),
    ],
)
def test_consecutive_cells_start_over_behind_an_occupied_one(
    used: list[int], head: int, n: int, expected: list[int] | None
) -> None:
    slot = occupied(8, used, head).find_slot(run(0, 20, 20 + n), cont=True)
    assert (slot and slot.idxs.tolist()) == (expected and [expected])


@given(
    owners=st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=1, max_size=12),
    pos=st.lists(st.integers(0, 14), min_size=12, max_size=12),
    head=st.integers(0, 12),
    n=st.integers(1, 7),
    cont=st.booleans(),
    window=st.sampled_from(list(SwaType)).flatmap(lambda t: st.builds(Window, st.integers(1, 6), st.just(t))),
)
def test_the_search_finds_what_the_cell_by_cell_walk_finds(
    *, owners: list[set[int]], pos: list[int], head: int, n: int, cont: bool, window: Window
) -> None:
    size = len(owners)
    streams = CellStreams(size, window=window)
    naive = NaiveStreams(size, 1, True, window.n_swa, window.type.name)
    for i, ids in enumerate(owners):
        if ids:
            streams.cells[0].pos_set(i, pos[i])
            naive.cells[0].pos_set(i, pos[i])
        for s in ids:
            streams.cells[0].seq_add(i, s)
            naive.cells[0].seq_add(i, s)
    streams.heads[0] = naive.heads[0] = min(head, size)
    slot = streams.find_slot(run(0, 20, 20 + n), cont)
    expected = naive.walk(0, n, cont)
    assert (slot.idxs[0].tolist() if slot else None) == expected


def test_each_sequence_gets_cells_of_its_own_stream() -> None:
    streams = CellStreams(8, n_seq_max=4, unified=False)
    streams.heads[3] = 5
    slot = streams.find_slot(ubatch([(1, 0), (1, 1), (3, 0), (3, 1)], equal=True))
    assert slot is not None
    assert (slot.s0, slot.s1, slot.streams, slot.n_stream, slot.n_tokens) == (1, 3, (1, 3), 3, 4)
    assert slot.idxs.tolist() == [[0, 1], [0, 1]], "nothing used: head 5 > 0 + 2 * 2 starts over"


def test_one_full_stream_refuses_the_whole_ubatch() -> None:
    streams = CellStreams(2, n_seq_max=2, unified=False)
    streams.cells[1].pos_set(0, 0)
    assert streams.find_slot(ubatch([(0, 0), (0, 1), (1, 1), (1, 2)], equal=True)) is None


@pytest.mark.parametrize(
    "entries",
    [
        [(0, 0), (0, 1), (1, 0)],
        [(0, 0), (1, 0), (0, 1), (1, 1)],
        [((0, 1), 0), ((0, 1), 1)],
    ],
)
def test_tokens_that_do_not_stand_stream_by_stream_are_refused(
    entries: list[tuple[int | tuple[int, ...], int]],
) -> None:
    streams = CellStreams(8, n_seq_max=2, unified=False)
    with pytest.raises(BatchError, match="ubatch"):
        streams.find_slot(ubatch(entries, equal=True))


def test_a_sequence_without_a_stream_is_refused() -> None:
    streams = CellStreams(8, n_seq_max=2, unified=False)
    with pytest.raises(SequenceError, match="seq_id = 2"):
        streams.find_slot(run(2, 0, 1))


def test_rows_and_elements_follow_streams_and_cells() -> None:
    slot = SlotInfo(0, 1, (0, 1), np.array([[5, 6], [0, 1]]))
    assert row_indices(slot, 256).tolist() == [5, 6, 256, 257]
    elements = element_indices(slot, 256, 4)
    assert elements.dtype == np.int64
    assert elements.tolist()[:8] == [5, 261, 517, 773, 6, 262, 518, 774]
    assert elements.tolist()[8:12] == [1024, 1280, 1536, 1792]
    single = SlotInfo(0, 0, (0,), np.array([[7, 3]]))
    assert row_indices(single, 8).tolist() == [7, 3]
    assert element_indices(single, 8, 2).tolist() == [7, 15, 3, 11]


def test_rows_of_a_later_stream_alone_are_offset_too() -> None:
    slot = SlotInfo(2, 2, (2,), np.array([[1]]))
    assert row_indices(slot, 8).tolist() == [17]
    assert element_indices(slot, 8, 2).tolist() == [33, 41]


@pytest.mark.parametrize(("used_end", "n_kv"), [(0, 256), (1, 256), (256, 256), (257, 512), (1000, 1024), (1024, 1024)])
def test_visited_cells_are_rounded_up(used_end: int, n_kv: int) -> None:
    streams = CellStreams(1024)
    slot = SlotInfo(0, 0, (0,), np.zeros((1, 1), np.int64))
    if used_end:
        streams.cells[0].pos_set(used_end - 1, 0)
    assert streams.n_kv(slot) == n_kv
    assert streams.n_kv(slot, 32) == n_kv


def test_visited_cells_cover_the_fullest_stream_of_the_slot() -> None:
    streams = CellStreams(2000, n_seq_max=3, unified=False)
    for stream, last in enumerate((10, 600, 1900)):
        streams.cells[stream].pos_set(last, 0)
    assert streams.n_kv(SlotInfo(0, 1, (0, 1), np.zeros((2, 1), np.int64))) == 768
    assert streams.n_kv(SlotInfo(0, 2, (0, 1, 2), np.zeros((3, 1), np.int64))) == 2000
    assert streams.n_kv(SlotInfo(0, 0, (0,), np.zeros((1, 1), np.int64)), 512) == 512


def test_searching_leaves_the_cells_alone() -> None:
    streams = occupied(8, [0, 1, 2, 5], 6)
    before = streams.dump()
    for n in range(1, 9):
        for cont in (False, True):
            streams.find_slot(run(0, 4, 4 + n), cont)
    assert (streams.dump(), streams.heads) == (before, [6])
    assert isinstance(streams.cells[0], KVCells)
    streams.check()
