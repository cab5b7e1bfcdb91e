"""Moving cells that several sequences share: a copy moves, the shared cell stays as it is."""

from __future__ import annotations

import pytest
from support.cell_state import queued, shifts, state
from support.ubatches import run

from pykv.cells import CellStreams, SwaType, Window
from pykv.errors import ParamError, ShiftUnsupported


def forked(n_cells: int = 8, *, reference_moves: bool = False) -> CellStreams:
    """Return positions 0..2 that sequences 0 and 1 share, in cells 0..2, and 3 of sequence 0 alone in cell 3."""
    streams = CellStreams(n_cells, reference_moves=reference_moves)
    for ub in (run((0, 1), 0, 3), run(0, 3, 4)):
        slot = streams.find_slot(ub)
        assert slot is not None
        streams.apply(slot, ub)
    return streams


def test_the_mover_gets_copies_and_its_sibling_keeps_the_cells() -> None:
    streams = forked()
    streams.seq_add(0, 1, -1, 5)
    assert streams.dump() == "0:0{0,1} 1:1{1} 2:2{1} 3:8{0} 4:6{0} 5:7{0}"
    assert queued(streams) == [(0, 0, [1, 2], [4, 5])]
    assert shifts(streams) == [0, 0, 0, 5, 5, 5, 0, 0]
    assert streams.heads == [0]
    streams.check()


def test_copies_go_to_free_cells_in_ring_order_from_the_head() -> None:
    streams = forked()
    streams.heads[0] = 7
    streams.seq_add(1, 0, -1, 1)
    assert streams.dump() == "0:0{0} 1:1{0} 2:2{0} 3:3{0} 4:2{1} 5:3{1} 6:. 7:1{1}"
    assert queued(streams) == [(0, 0, [0, 1, 2], [7, 4, 5])]


def test_a_cell_that_leaves_the_window_is_not_written_over_by_a_copy() -> None:
    streams = CellStreams(5, window=Window(2, SwaType.STANDARD))
    for ub in (run((0, 1), 0, 2), run(2, 0, 3)):
        slot = streams.find_slot(ub)
        assert slot is not None
        streams.apply(slot, ub)
    before = state(streams)
    with pytest.raises(ShiftUnsupported):
        streams.seq_add(0, 0, -1, 1)
    assert state(streams) == before


def test_shared_positions_that_fall_below_zero_need_no_copy() -> None:
    streams = forked(4)
    streams.seq_add(1, 0, -1, -3)
    assert streams.dump() == "0:0{0} 1:1{0} 2:2{0} 3:3{0}"
    assert (queued(streams), shifts(streams)) == ([], [0] * 4)
    streams = forked(6)
    streams.seq_add(1, 0, -1, -1)
    assert streams.dump() == "0:0{0} 1:1{0} 2:2{0} 3:3{0} 4:0{1} 5:1{1}"
    assert queued(streams) == [(0, 0, [1, 2], [4, 5])]
    streams.check()


def test_a_division_copies_only_what_it_moves() -> None:
    streams = forked()
    streams.seq_div(1, 0, -1, 2)
    assert streams.dump() == "0:0{0,1} 1:1{0} 2:2{0} 3:3{0} 4:0{1} 5:1{1}"
    assert queued(streams) == [(0, 0, [1, 2], [4, 5])]
    assert shifts(streams) == [0, 0, 0, 0, -1, -1, 0, 0]
    assert streams.heads == [4]
    streams.check()


def test_a_division_that_leaves_all_where_it_is_queues_nothing() -> None:
    streams = forked(4)
    streams.seq_div(1, 0, 1, 2)
    assert streams.dump() == "0:0{0,1} 1:1{0,1} 2:2{0,1} 3:3{0}"
    assert queued(streams) == []


def test_a_copy_takes_the_pending_shift_along() -> None:
    streams = forked()
    streams.seq_rm(1)
    streams.seq_add(0, 0, -1, 2)
    streams.seq_cp(0, 1, 0, 4)
    streams.seq_add(1, 0, -1, -1)
    assert streams.dump() == "0:2{0} 1:3{0} 2:4{0} 3:5{0} 4:1{1} 5:2{1}"
    assert shifts(streams) == [2, 2, 2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize(("verb", "by"), [("seq_add", 1), ("seq_add", -1), ("seq_div", 2)])
def test_without_room_the_sharers_are_named_and_nothing_changes(verb: str, by: int) -> None:
    streams = forked(5)
    streams.seq_cp(1, 7, 2, 3)
    streams.seq_cp(0, 9, 3, 4)
    before = state(streams)
    with pytest.raises(ShiftUnsupported, match=r"sequences \[1, 7\], and only 1 cells are free") as caught:
        getattr(streams, verb)(0, 1, 3, by)
    assert caught.value.reason == "shared_cells"
    assert state(streams) == before
    streams.check()


def test_removing_a_sibling_makes_the_move_possible() -> None:
    streams = forked(4)
    with pytest.raises(ShiftUnsupported):
        streams.seq_add(0, 0, -1, 1)
    streams.seq_rm(1)
    streams.seq_add(0, 0, -1, 1)
    assert streams.dump() == "0:1{0} 1:2{0} 2:3{0} 3:4{0}"
    assert queued(streams) == []


def test_a_position_past_the_limit_is_refused_before_anything_is_copied() -> None:
    streams = forked()
    before = state(streams)
    with pytest.raises(ParamError, match="delta"):
        streams.seq_add(1, 0, -1, 2**31 - 3)
    assert state(streams) == before


def test_moved_back_a_copy_stays_a_copy() -> None:
    streams = forked()
    streams.seq_add(1, 0, -1, 4)
    streams.seq_add(1, 0, -1, -4)
    assert streams.dump() == "0:0{0} 1:1{0} 2:2{0} 3:3{0} 4:0{1} 5:1{1} 6:2{1}"
    assert streams.moved_rows()[0].tolist() == []


# reference_moves: as llama.cpp does


def test_the_reference_moves_shared_cells_for_all_owners() -> None:
    streams = forked(4, reference_moves=True)
    streams.seq_add(1, 1, -1, 5)
    assert streams.dump() == "0:0{0,1} 1:6{0,1} 2:7{0,1} 3:3{0}"
    assert (queued(streams), shifts(streams)) == ([], [0, 5, 5, 0])
    streams.seq_add(0, 0, 1, -1)
    assert streams.dump() == "0:. 1:6{0,1} 2:7{0,1} 3:3{0}"
    streams.check()


def test_the_reference_turns_keys_by_old_minus_new_in_a_division() -> None:
    streams = forked(4, reference_moves=True)
    streams.seq_div(0, 0, -1, 2)
    assert streams.dump() == "0:0{0,1} 1:0{0,1} 2:1{0,1} 3:1{0}"
    assert shifts(streams) == [0, 1, 1, 2]


# pending work


def in_two_streams() -> CellStreams:
    """Return sequences 0 and 1 at 0..2, moved by 4 and by -1 from position 1 on."""
    streams = CellStreams(4, n_seq_max=2, unified=False)
    for s in range(2):
        slot = streams.find_slot(run(s, 0, 3))
        assert slot is not None
        streams.apply(slot, run(s, 0, 3))
    streams.seq_add(0, 1, -1, 4)
    streams.seq_add(1, 1, -1, -1)
    return streams


def test_moved_rows_count_through_all_streams() -> None:
    streams = in_two_streams()
    rows, deltas = streams.moved_rows()
    assert (rows.tolist(), deltas.tolist()) == ([1, 2, 5, 6], [4, 4, -1, -1])
    streams.seq_rm(0, 5, 6)
    streams.seq_add(1, 0, -1, 1)
    rows, deltas = streams.moved_rows()
    assert (rows.tolist(), deltas.tolist()) == ([2, 4], [4, 1])


def test_no_rows_have_moved_when_the_moved_ones_are_gone() -> None:
    streams = in_two_streams()
    streams.seq_rm(0, 1)
    streams.seq_rm(1, 0)
    assert streams.has_shift
    rows, deltas = streams.moved_rows()
    assert (rows.size, deltas.size) == (0, 0)
    assert [a.size for a in CellStreams(4).moved_rows()] == [0, 0]


def test_shifts_of_some_rows_are_forgotten_and_of_others_not() -> None:
    streams = in_two_streams()
    rows, _ = streams.moved_rows()
    streams.reset_shift(rows[[1, 2]])
    left, deltas = streams.moved_rows()
    assert (left.tolist(), deltas.tolist()) == ([1, 6], [4, -1])
    assert streams.has_shift
    streams.reset_shift(rows[:0])
    assert streams.moved_rows()[0].tolist() == [1, 6]
    streams.reset_shift()
    assert not streams.has_shift
    assert streams.moved_rows()[0].size == 0
    streams.check()
