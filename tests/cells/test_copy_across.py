"""Copies from one stream to another: spec kv_cache.md section 6.1, with ranges that mean what they say."""

from __future__ import annotations

import numpy as np
import pytest
from support.cell_state import queued, shifts, state
from support.ubatches import run, ubatch

from pykv.cells import CellStreams
from pykv.errors import NoSlotError


def streams_of(*n_tokens: int, n_cells: int = 8) -> CellStreams:
    """Return one stream per number, with that many tokens of the sequence of the same number."""
    streams = CellStreams(n_cells, n_seq_max=len(n_tokens), unified=False)
    for s, n in enumerate(n_tokens):
        if n:
            ub = run(s, 0, n)
            slot = streams.find_slot(ub)
            assert slot is not None
            streams.apply(slot, ub)
    return streams


@pytest.mark.parametrize(("p0", "p1"), [(-1, -1), (0, -1), (0, 6), (-5, 2**40), (0, 7)])
def test_a_range_that_holds_all_of_both_makes_a_twin(p0: int, p1: int) -> None:
    streams = streams_of(4, 6)
    streams.seq_rm(0, 1, 2)
    streams.seq_cp(0, 1, p0, p1)
    assert streams.dump(1) == "0:0{1} 1:. 2:2{1} 3:3{1}"
    assert streams.dump(0) == "0:0{0} 1:. 2:2{0} 3:3{0}"
    assert streams.heads == [1, 1], "the twin's next search starts where the other's does"
    assert queued(streams) == [(0, 1, [0, 2, 3], [0, 2, 3])]
    streams.seq_rm(0)
    assert streams.pos_max(1) == 3
    streams.check()


@pytest.mark.parametrize(
    ("p0", "p1", "dump", "copies"),
    [
        (0, 2, "0:0{1} 1:1{1} 2:2{1} 3:3{1} 4:4{1} 5:5{1}", [(0, 1, [0, 1], [0, 1])]),
        (1, -1, "0:0{1} 1:1{1} 2:2{1} 3:3{1}", [(0, 1, [1, 2, 3], [1, 2, 3])]),
        (3, 5, "0:0{1} 1:1{1} 2:2{1} 3:3{1} 4:. 5:5{1}", [(0, 1, [3], [3])]),
        (4, -1, "0:0{1} 1:1{1} 2:2{1} 3:3{1}", []),
        (6, -1, "0:0{1} 1:1{1} 2:2{1} 3:3{1} 4:4{1} 5:5{1}", []),
        (0, 0, "0:0{1} 1:1{1} 2:2{1} 3:3{1} 4:4{1} 5:5{1}", []),
        (3, 1, "0:0{1} 1:1{1} 2:2{1} 3:3{1} 4:4{1} 5:5{1}", []),
    ],
)
def test_a_part_replaces_that_part(
    p0: int, p1: int, dump: str, copies: list[tuple[int, int, list[int], list[int]]]
) -> None:
    streams = streams_of(4, 6)
    streams.seq_cp(0, 1, p0, p1)
    assert streams.dump(1) == dump
    assert streams.dump(0) == "0:0{0} 1:1{0} 2:2{0} 3:3{0}"
    assert queued(streams) == copies
    streams.check()


@pytest.mark.parametrize(("p0", "p1"), [(0, 0), (1, 1), (8, 3), (9, -1)])
def test_copying_nothing_changes_nothing(p0: int, p1: int) -> None:
    streams = streams_of(4, 6, 0)
    before = state(streams)
    streams.seq_cp(0, 1, p0, p1)
    streams.seq_cp(0, 2, p0, p1)
    assert state(streams) == before


def test_copying_an_empty_sequence_empties_the_destination() -> None:
    streams = streams_of(0, 6)
    streams.seq_cp(0, 1)
    assert (streams.dump(1), streams.heads, queued(streams)) == ("", [0, 0], [])


def test_a_part_goes_to_free_cells_in_ring_order_from_the_head() -> None:
    streams = streams_of(5, 6)
    streams.seq_add(1, 0, -1, 10)
    streams.seq_rm(1, 11, 13)
    streams.heads[1] = 7
    streams.seq_cp(0, 1, 2, 5)
    assert streams.dump(1) == "0:10{1} 1:3{1} 2:4{1} 3:13{1} 4:14{1} 5:15{1} 6:. 7:2{1}"
    assert queued(streams) == [(0, 1, [2, 3, 4], [7, 1, 2])]
    assert streams.heads == [5, 7]
    streams.check()


def test_what_the_copy_replaces_makes_room_for_it() -> None:
    streams = streams_of(4, 8)
    streams.seq_cp(0, 1, 2, 4)
    assert streams.dump(1) == " ".join(f"{i}:{i}{{1}}" for i in range(8))
    assert queued(streams) == [(0, 1, [2, 3], [2, 3])]


def test_a_copy_without_room_is_refused_whole() -> None:
    streams = streams_of(6, 6)
    streams.seq_add(1, 1, -1, 20)
    before = state(streams)
    with pytest.raises(NoSlotError, match=r"^seq_cp: 6 cells of sequence 0, and stream 1 has room for 3"):
        streams.seq_cp(0, 1, 0, 6)
    assert state(streams) == before
    streams.seq_cp(0, 1, 0, 3)
    assert streams.cells[1].n_used == 8


def test_what_a_cell_notes_goes_along() -> None:
    streams = CellStreams(4, n_seq_max=2, unified=False)
    ub = ubatch([(0, 5)], tokens=[42], xy=[(2, 3)])
    slot = streams.find_slot(ub)
    assert slot is not None
    streams.apply(slot, ub)
    streams.seq_cp(0, 1)
    cells = streams.cells[1]
    assert (cells.ext_x[0], cells.ext_y[0], cells.ext_tok[0]) == (2, 3, 42)


def test_pending_shifts_go_along_with_the_whole() -> None:
    streams = streams_of(4, 3)
    streams.seq_add(1, 0, -1, 1)
    streams.seq_add(0, 2, -1, -1)
    streams.seq_cp(0, 1)
    assert shifts(streams) == [0, 0, -1, -1, 0, 0, 0, 0] * 2
    assert [cells.has_shift for cells in streams.cells] == [True, True]
    streams.check()


def test_pending_shifts_go_along_with_a_part() -> None:
    streams = streams_of(4, 3)
    streams.seq_add(1, 0, -1, 1)
    streams.seq_add(0, 2, -1, -1)
    streams.seq_cp(0, 1, 2)
    assert streams.dump(1) == "0:1{1} 1:2{1}"
    assert shifts(streams)[8:] == [1, -1, 0, 0, 0, 0, 0, 0]
    streams.check()


def test_what_was_pending_for_the_replaced_cells_goes_with_them() -> None:
    streams = streams_of(4, 3)
    streams.seq_add(1, 0, -1, 1)
    streams.seq_cp(0, 1)
    assert not streams.has_shift
    assert streams.moved_rows()[0].size == 0


def test_only_the_shift_that_the_source_still_needs_goes_along() -> None:
    streams = streams_of(4, 2)
    streams.seq_add(0, 0, -1, 3)
    streams.reset_shift(np.array([0, 1]))
    streams.seq_cp(0, 1)
    assert shifts(streams)[8:] == [0, 0, 3, 3, 0, 0, 0, 0]
