"""Recurrent states: the worked examples of the specification, and what pykv decides where it leaves a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.resume_runs import spread
from support.ubatches import ubatch

from pykv.batch import reserve_ubatch
from pykv.batch.ubatch import UBatch
from pykv.cells import RecurrentCells, RecurrentSlot
from pykv.errors import BatchError, ParamError, SequenceError

Ids = int | tuple[int, ...]


def after(cells: RecurrentCells, *sets: Ids, n: int = 1) -> UBatch:
    """Return the ubatch of the next `n` tokens of each set of sequences."""
    entries = []
    for ids in sets:
        first = ids if isinstance(ids, int) else ids[0]
        start = cells.pos_max(first) + 1
        entries += [(ids, start + k) for k in range(n)]
    return ubatch(entries, equal=True)


def decode(cells: RecurrentCells, *sets: Ids, n: int = 1) -> RecurrentSlot:
    slot = cells.find_slot(after(cells, *sets, n=n))
    cells.apply(slot)
    cells.check()
    return slot


def told(slot: RecurrentSlot) -> tuple[int, int, int, list[int]]:
    return slot.head, slot.n, slot.rs_z, slot.s_copy.tolist()


def one_after_another(n_cells: int, n_rs_seq: int = 0, n: int = 3) -> RecurrentCells:
    """Return cells that hold sequence s in cell s, each of `n` tokens."""
    cells = RecurrentCells(n_cells, n_cells, n_rs_seq)
    for s in range(n_cells):
        decode(cells, s, n=n)
    return cells


# the search (iswa_recurrent_hybrid.md 2.4)


def test_example_a_a_new_sequence_begins_with_zeros() -> None:
    cells = RecurrentCells(4, 4)
    assert told(decode(cells, 0, n=3)) == (0, 1, 0, [0])
    assert cells.dump() == "0:2{0}"


def test_example_b_one_row_of_zeros_serves() -> None:
    cells = RecurrentCells(4, 4)
    decode(cells, 0, n=3)
    slot = decode(cells, 0, 1)
    assert told(slot) == (0, 2, 1, [0, 1])
    assert (slot.n_seqs, slot.n_planes) == (2, 1)


def test_example_c_a_fork_reads_the_shared_row_and_writes_its_own() -> None:
    cells = RecurrentCells(4, 4)
    decode(cells, 0, 1)
    cells.seq_cp(0, 2)
    assert cells.dump() == "0:0{0,2} 1:0{1}"
    assert told(decode(cells, 2)) == (2, 1, 2, [0])
    assert cells.dump() == "0:0{0} 1:0{1} 2:1{2}"


def test_example_d_a_stranger_in_between_moves_behind() -> None:
    cells = one_after_another(3)
    assert told(decode(cells, 0, 2)) == (0, 3, -1, [0, 2, 1])
    assert cells.dump() == "0:3{0} 1:3{2} 2:2{1}"


def test_generation_reuses_its_graph() -> None:
    cells = one_after_another(2)
    slots = [told(decode(cells, 0, 1)) for _ in range(3)]
    assert slots == [(0, 2, -1, [0, 1])] * 3


def test_prepare_leaves_no_trace_and_apply_wants_the_cells_unchanged() -> None:
    cells = one_after_another(2)
    ub = after(cells, 0, 1)
    first, second = cells.prepare([ub, ub])
    assert cells.dump() == "0:2{0} 1:2{1}"
    with pytest.raises(ParamError, match="slot"):
        cells.apply(second)
    cells.apply(first)
    cells.seq_rm(1)
    with pytest.raises(ParamError, match="slot"):
        cells.apply(second)
    assert cells.dump() == "0:3{0}"


def test_only_whole_and_disjoint_sets_are_taken() -> None:
    cells = RecurrentCells(3, 3)
    shrinking = replace(ubatch([((0, 1), 0), ((0,), 1)], equal=True), n_seqs=1)
    wrong = [
        (ubatch([(0, 0), (1, 0)]), BatchError, "sequence set"),
        (shrinking, BatchError, "set 0"),
        (ubatch([((0, 1), 0), ((1, 2), 0)], equal=True), BatchError, r"\[1\]"),
        (ubatch([(3, 0)], equal=True), SequenceError, "3"),
        (ubatch([(0, -1)], equal=True), ParamError, "-1"),
        (reserve_ubatch(1, 1), BatchError, "at least one"),
    ]
    for ub, error, words in wrong:
        with pytest.raises(error, match=words):
            cells.find_slot(ub)
    assert cells.dump() == ""


# verbs (2.2)


REMOVALS = [
    # p0, p1, answer, what is left of a sequence at position 4 without snapshots
    (-1, -1, True, -1),
    (0, 5, True, -1),
    (0, 4, True, 4),
    (1, 4, True, 4),
    (5, -1, True, 4),
    (3, 3, True, 4),
    (4, -1, False, 4),
    (1, 5, False, 4),
]


@pytest.mark.parametrize(("p0", "p1", "answer", "left"), REMOVALS)
@pytest.mark.parametrize("seq_id", [0, -1])
def test_without_snapshots_a_state_goes_whole_or_stays(seq_id: int, p0: int, p1: int, answer: bool, left: int) -> None:
    cells = RecurrentCells(2, 2)
    decode(cells, 0, n=5)
    assert cells.seq_rm(seq_id, p0, p1) is answer
    assert (cells.pos_min(0), cells.pos_max(0)) == (left, left)
    cells.check()


ROLLBACKS = [
    # tokens of the ubatches, first removed position, answer, row that is read then (4 cells)
    ((9,), 8, True, 4),
    ((9,), 6, True, 12),
    ((9,), 5, False, 0),
    ((3,), 1, True, 8),
    ((3,), 0, True, None),
    ((6, 1), 6, False, 0),  # the snapshots are of the ubatch before
    ((1, 1, 1, 1), 3, False, 0),
    ((1, 2), 2, True, 4),
    ((1, 2), 1, False, 0),
]


@pytest.mark.parametrize(("tokens", "p0", "answer", "row"), ROLLBACKS)
def test_a_rollback_is_granted_where_a_snapshot_was_left(
    tokens: Sequence[int], p0: int, answer: bool, row: int | None
) -> None:
    cells = RecurrentCells(4, 4, 3)
    for n in tokens:
        decode(cells, 0, n=n)
    assert cells.seq_rm(0, p0, -1) is answer
    assert cells.row(0) == row
    assert cells.pos_max(0) == (p0 - 1 if answer else sum(tokens) - 1)


def test_a_rollback_is_not_stacked_on_another_and_is_over_with_the_next_token() -> None:
    cells = RecurrentCells(2, 2, 8)
    decode(cells, 0, n=9)
    assert cells.seq_rm(0, 6, -1)
    assert cells.dump() == "0:5{0}^3"
    assert not cells.seq_rm(0, 5, -1)
    assert cells.why_not_resumable(0, 5) == ("rollback_pending", 0)
    assert told(decode(cells, 0, n=2)) == (0, 1, -1, [3 * 2])
    assert cells.dump() == "0:7{0}"
    assert cells.seq_rm(0, 7, -1)


def test_a_removed_sequence_takes_its_pending_rollback_along() -> None:
    cells = RecurrentCells(2, 2, 2)
    decode(cells, 0, n=3)
    assert cells.seq_rm(0, 2, -1)
    assert cells.seq_rm(0, 0, 2)  # finite, but all of it
    assert told(decode(cells, 0)) == (0, 1, 0, [0])


def test_of_several_sequences_none_goes_back_if_one_cannot() -> None:
    cells = RecurrentCells(2, 2, 2)
    decode(cells, 0, n=3)
    decode(cells, 1, n=3)
    decode(cells, 1, n=1)
    assert not cells.seq_rm(-1, 2, -1)
    assert cells.dump() == "0:2{0} 1:3{1}"
    assert cells.seq_rm(-1)
    assert cells.dump() == ""


def test_a_fork_goes_back_alone() -> None:
    cells = RecurrentCells(3, 3, 2)
    decode(cells, 0, n=4)
    cells.seq_cp(0, 1)
    assert cells.seq_rm(1, 2, -1)
    assert cells.dump() == "0:3{0},1{1}^2"
    assert told(decode(cells, 1)) == (1, 1, 1, [2 * 3])
    assert cells.dump() == "0:3{0} 1:2{1}"
    assert cells.seq_rm(0, 3, -1)  # the fork has not touched its snapshots


def test_a_copy_reads_what_its_source_would() -> None:
    cells = RecurrentCells(3, 3, 2)
    decode(cells, 0, n=4)
    assert cells.seq_rm(0, 3, -1)
    cells.seq_cp(0, 1)
    assert cells.row(0) == cells.row(1) == 3
    assert told(decode(cells, 1)) == (1, 1, 1, [3])


COPIES = [
    # p0, p1, position of the copy; None = refused
    (-1, -1, 5),
    (0, 6, 5),
    (3, -1, 5),  # a state holds all from its first token on
    (0, 5, 4),
    (0, 4, 3),
    (0, 3, None),
    (6, -1, 0),
    (4, 4, 0),
]


@pytest.mark.parametrize(("p0", "p1", "pos"), COPIES)
def test_a_part_is_copied_as_far_as_states_are_kept(p0: int, p1: int, pos: int | None) -> None:
    cells = RecurrentCells(3, 3, 2)
    decode(cells, 0, n=6)
    decode(cells, 1)
    if pos is None:
        with pytest.raises(ParamError, match="p1 = 3"):
            cells.seq_cp(0, 1, p0, p1)
        assert cells.dump() == "0:5{0} 1:0{1}"
    else:
        cells.seq_cp(0, 1, p0, p1)
        assert (cells.pos_max(0), cells.pos_max(1)) == (5, pos)
    cells.check()


def test_copying_an_empty_sequence_empties() -> None:
    cells = RecurrentCells(2, 2)
    decode(cells, 1)
    cells.seq_cp(0, 1)
    assert cells.dump() == ""


def test_a_move_takes_only_the_one_that_is_meant() -> None:
    cells, reference = (RecurrentCells(2, 2, reference_moves=mode) for mode in (False, True))
    for each in (cells, reference):
        decode(each, 0, n=4)
        each.seq_cp(0, 1)
        each.seq_add(1, 0, -1, 3)
    assert cells.dump() == "0:3{0},6{1}"
    assert reference.dump() == "0:6{0,1}"


def test_what_falls_below_zero_is_removed() -> None:
    cells = RecurrentCells(2, 2)
    decode(cells, 0, n=4)
    cells.seq_add(0, 0, -1, -4)
    assert cells.dump() == ""
    cells.check()


def test_moves_outside_the_range_and_beyond_the_limit() -> None:
    cells = RecurrentCells(2, 2)
    decode(cells, 0, n=4)
    cells.seq_add(0, 0, 3, 5)
    cells.seq_div(0, 4, -1, 2)
    assert cells.pos_max(0) == 3
    with pytest.raises(ParamError, match="delta"):
        cells.seq_add(0, 0, -1, 2**31 - 4)
    cells.seq_div(0, 0, -1, 2)
    assert cells.pos_max(0) == 1


def test_snapshots_move_with_their_sequence() -> None:
    cells = RecurrentCells(2, 2, 2)
    decode(cells, 0, n=4)
    cells.seq_add(0, 0, -1, 10)
    assert cells.seq_rm(0, 12, -1)
    assert (cells.pos_max(0), cells.row(0)) == (11, 4)
    decode(cells, 0, n=3)
    cells.seq_add(0, 14, -1, 5)  # the newest token alone: 12, 13, 19
    assert cells.seq_rm(0, 15, -1)
    assert (cells.pos_max(0), cells.row(0)) == (13, 2)


def test_positions_with_gaps_are_counted_in_tokens() -> None:
    cells = RecurrentCells(1, 1, 3)
    cells.apply(cells.find_slot(ubatch([(0, 3), (0, 7), (0, 8), (0, 8)], equal=True)))
    assert cells.seq_rm(0, 8, -1)
    assert (cells.pos_max(0), cells.row(0)) == (7, 2)


def test_keeping_one_sequence_resets_the_search() -> None:
    cells = one_after_another(4)
    cells.seq_keep(2)
    assert cells.dump() == "0:. 1:. 2:2{2}"
    assert told(decode(cells, 0)) == (0, 1, 0, [0])


def test_strangers_are_refused() -> None:
    cells = RecurrentCells(2, 2)
    calls = [
        lambda: cells.seq_rm(2),
        lambda: cells.seq_rm(-2),
        lambda: cells.seq_cp(0, 2),
        lambda: cells.seq_cp(-1, 0),
        lambda: cells.seq_keep(-1),
        lambda: cells.seq_add(2, 0, -1, 1),
        lambda: cells.pos_max(-1),
        lambda: cells.why_not_resumable(2, 0),
        lambda: cells.place(2, 0),
    ]
    for call in calls:
        with pytest.raises(SequenceError):
            call()
    for wrong in ((0, 1, 0), (1, 2, 0), (2, 2, -1), (300, 257, 0)):
        with pytest.raises(ParamError):
            RecurrentCells(*wrong)


# what other ubatches do to a state that they pass over


def test_a_state_that_stays_keeps_its_snapshots_and_one_that_moves_does_not() -> None:
    cells = one_after_another(4, n_rs_seq=2)
    assert told(decode(cells, 0, 3)) == (0, 4, -1, [0, 3, 2, 1])
    assert cells.seq_rm(2, 2, -1)
    assert not cells.seq_rm(1, 2, -1)
    assert cells.why_not_resumable(1, 2) == ("state_gone", 0)


def test_a_pending_rollback_is_resolved_when_its_state_moves() -> None:
    cells = one_after_another(4, n_rs_seq=2)
    cells.seq_rm(1, 2, -1)
    cells.seq_rm(2, 1, -1)
    assert told(decode(cells, 0, 3)) == (0, 4, -1, [0, 3, 2 * 4 + 2, 4 + 1])
    assert cells.dump() == "0:3{0} 1:3{3} 2:0{2} 3:1{1}"


def test_sharers_that_read_different_planes_part_before_their_state_moves() -> None:
    cells = RecurrentCells(5, 5, 2)
    for s in range(4):
        decode(cells, s, n=3)
    cells.seq_cp(1, 4)
    cells.seq_rm(4, 2, -1)
    assert told(decode(cells, 0, 3)) == (0, 5, 4, [0, 3, 2, 1, 5 + 1])
    assert cells.dump() == "0:3{0} 1:3{3} 2:2{2} 3:2{1} 4:1{4}"


def test_the_run_grows_downwards_too_if_only_there_is_room_to_part() -> None:
    cells = one_after_another(5, n_rs_seq=2)
    cells.seq_cp(2, 0)
    cells.seq_rm(0, 2, -1)
    assert cells.dump() == "0:. 1:2{1} 2:1{0}^1,2{2} 3:2{3} 4:2{4}"
    assert told(decode(cells, 1, 4)) == (0, 5, 0, [1, 4, 2, 3, 5 + 2])
    assert cells.dump() == "0:3{1} 1:3{4} 2:2{2} 3:2{3} 4:1{0}"


# computations that fail


def test_a_failed_computation_costs_the_sequences_that_it_wrote() -> None:
    cells = one_after_another(4)
    slot = decode(cells, 1)
    assert cells.retract(slot) == (1,)
    assert cells.dump() == "0:2{0} 1:. 2:2{2} 3:2{3}"


def test_a_fork_survives_its_first_failed_computation() -> None:
    cells = RecurrentCells(2, 2)
    decode(cells, 0, n=3)
    cells.seq_cp(0, 1)
    assert cells.retract(decode(cells, 1)) == ()
    assert cells.dump() == "0:2{0,1}"


def test_nothing_is_lost_if_nothing_was_computed() -> None:
    cells = one_after_another(4, n_rs_seq=2)
    cells.seq_rm(1, 2, -1)
    before = cells.dump()
    slot = decode(cells, 0, 3)
    assert slot.rows_at_risk(4, 2).tolist() == [0, 1, 3, 4, 5, 8, 9]
    assert cells.retract(slot, touched=False) == ()
    assert cells.dump() == before
    with pytest.raises(ParamError, match="slot"):
        cells.retract(slot)


def test_a_row_of_zeros_is_not_trusted_after_a_failed_computation() -> None:
    cells = RecurrentCells(4, 4)
    for s in range(3):
        decode(cells, s)
    cells.seq_rm(1)
    assert told(decode(cells, 0, 2)) == (0, 3, 1, [0, 2, 1])  # cell 2 gets zeros
    slot = decode(cells, 3)
    assert told(slot) == (2, 1, -1, [2])
    assert cells.retract(slot) == ()
    assert told(decode(cells, 3)) == (2, 1, 2, [2])


def test_a_row_that_was_zeroed_is_lost_although_it_did_not_move() -> None:
    cells = one_after_another(4)
    slot = decode(cells, (0, 2), 3)
    assert told(slot) == (0, 4, 2, [0, 3, 2, 1])
    assert cells.retract(slot) == (0, 1, 2, 3)


def test_a_bookmark_brings_the_bookkeeping_back() -> None:
    cells = one_after_another(3, n_rs_seq=2)
    before, n_changes = cells.dump(), cells.n_changes
    undo = cells.bookmark()
    cells.seq_rm(0, 2, -1)
    cells.seq_cp(0, 1)
    undo()
    assert cells.dump() == before
    assert cells.n_changes > n_changes
    cells.check()


# questions


RESUMABLE = [
    # p, answer; a sequence at position 5 with snapshots of 4 and 3
    (0, None),
    (3, ("state_gone", 0)),
    (4, None),
    (5, None),
    (6, None),
    (7, ("missing", 6)),
]


@pytest.mark.parametrize(("p", "answer"), RESUMABLE)
def test_resumable_where_the_state_is_that_of_all_tokens_before(p: int, answer: tuple[str, int] | None) -> None:
    cells = RecurrentCells(2, 2, 2)
    decode(cells, 0, n=6)
    assert cells.why_not_resumable(0, p) == answer
    assert spread(cells.resume_points(0, 7), 7) == [True, False, False, False, True, True, True, False]


def test_an_empty_sequence_is_resumable_from_the_beginning() -> None:
    cells = RecurrentCells(1, 1)
    assert cells.why_not_resumable(0, 0) is None
    assert cells.why_not_resumable(0, 1) == ("missing", 0)
    assert spread(cells.resume_points(0, 1), 1) == [True, False]


def test_the_view_follows_and_cannot_be_written() -> None:
    cells = RecurrentCells(3, 3)
    view = cells.view()
    assert view.words() == []
    decode(cells, 0, n=2)
    decode(cells, 2)
    cells.seq_cp(0, 1)
    assert view.words() == ["0:1{0,1}", "1:0{2}"]
    assert view.pos.tolist() == [1, 0, -1]
    assert view.n_owners.tolist() == [2, 1, 0]
    assert view.sequences == (0, 1, 2)
    assert view.owners.tolist() == [[True, False, False], [True, False, False], [False, True, False]]
    assert view.member(1).tolist() == [True, False, False]
    assert view.owners_of(0) == (0, 1)
    assert (view.n, view.n_used) == (3, 2)
    assert (view.token.tolist(), view.shift.tolist()) == ([-1] * 3, [0] * 3)
    for array in (view.pos, view.n_owners, view.owners, view.member(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_as_many_sequences_as_can_be_told_apart() -> None:
    cells = RecurrentCells(256, 256, 1)
    decode(cells, *range(256), n=2)
    slot = decode(cells, *range(256))
    assert told(slot) == (0, 256, -1, list(range(256)))
