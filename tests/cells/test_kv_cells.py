"""The operations of one stream: the specification's vectors (cells.md section 4), preconditions, read-only views."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykv.cells import KVCells
from pykv.errors import ParamError, SequenceError


def used(cells: KVCells) -> list[int]:
    return np.flatnonzero(cells.pos != -1).tolist()


def filled(n: int, count: int, s: int = 0) -> KVCells:
    cells = KVCells(n)
    idxs = np.arange(count)
    cells.pos_set(idxs, idxs.astype(np.int32))
    cells.seq_add(idxs, s)
    return cells


def test_a_cell_of_two_sequences_is_freed_by_the_second_removal() -> None:
    cells = KVCells(8)
    cells.pos_set(3, 7)
    cells.seq_add(3, 0)
    cells.seq_add(3, 2)
    assert used(cells) == [3]
    assert (cells.pos_min(0), cells.pos_max(2)) == (7, 7)
    assert cells.owners(3) == (0, 2)
    assert cells.seq_rm(3, 0).tolist() == [False]
    assert cells.seq_rm(3, 2).tolist() == [True]
    assert used(cells) == []
    assert (cells.pos_min(2), cells.used_min, cells.used_max_p1) == (-1, 0, 0)
    cells.check()


def test_a_shift_below_zero_empties_cells() -> None:
    cells = filled(4, 4)
    assert cells.pos_add(np.arange(4), -2).tolist() == [True, True, False, False]
    assert cells.pos.tolist() == [-1, -1, 0, 1]
    assert cells.shift.tolist() == [0, 0, -2, -2]
    assert cells.has_shift
    assert (cells.pos_min(0), cells.pos_max(0)) == (0, 1)
    assert (cells.used_min, cells.used_max_p1, cells.n_used) == (2, 4, 2)
    cells.check()


def test_shifts_of_a_cell_add_up() -> None:
    cells = filled(4, 4)
    cells.pos_add(2, 5)
    cells.pos_add(2, -3)
    assert cells.shift.tolist() == [0, 0, 2, 0]
    cells.reset_shift()
    assert not cells.has_shift
    assert not cells.shift.any()


def test_a_shift_by_nothing_still_counts_as_one() -> None:
    cells = filled(2, 1)
    cells.pos_add(0, 0)
    assert cells.has_shift
    cells.rm(0)
    assert cells.has_shift, "the update runs even if the cell is gone"


@pytest.mark.parametrize(("reference", "shift"), [(False, -6), (True, 6)])
def test_division_turns_keys_towards_the_new_position(reference: bool, shift: int) -> None:
    cells = KVCells(4, reference_div_sign=reference)
    cells.pos_set(1, 9)
    cells.seq_add(1, 0)
    cells.pos_div(1, 3)
    assert (cells.pos[1], cells.shift[1], cells.has_shift) == (3, shift, True)


def test_the_last_token_at_or_before_a_position_is_that_of_the_highest_cell() -> None:
    cells = KVCells(8)
    for i, tok in ((4, 11), (6, 12)):
        cells.pos_set(i, 5)
        cells.seq_add(i, 1)
        cells.ext_set(i, 0, 0, tok)
    assert cells.seq_pos_tok_le(1, 5) == 12
    cells.seq_rm(6, 1)
    assert cells.seq_pos_tok_le(1, 5) == 11
    assert cells.seq_pos_tok_le(1, 900) == 11
    assert cells.seq_pos_tok_le(1, 4) == -1
    assert cells.seq_pos_tok_le(0, 5) == -1


def test_a_snapshot_brings_cells_back_and_empties_others() -> None:
    cells = KVCells(8)
    cells.pos_set(2, 1)
    cells.seq_add(2, 0)
    cells.ext_set(2, 3, 4, 5)
    snap = cells.snapshot([2, 5])
    cells.pos_set(5, 9)
    cells.seq_add(5, 1)
    cells.rm(2)
    cells.restore([2, 5], snap)
    assert used(cells) == [2]
    assert cells.owners(2) == (0,)
    assert (cells.ext_x[2], cells.ext_y[2], cells.ext_tok[2]) == (3, 4, 5)
    assert (cells.pos_max(0), cells.pos_max(1)) == (1, -1)
    cells.check()


def test_a_snapshot_can_be_put_elsewhere() -> None:
    cells = filled(8, 3)
    cells.pos_add(1, 4)
    cells.restore([6, 7], cells.snapshot([1, 2]))
    assert cells.pos.tolist() == [0, 5, 2, -1, -1, -1, 5, 2]
    assert cells.shift.tolist() == [0, 4, 0, 0, 0, 0, 4, 0]
    cells.check()


def test_cells_without_owners_survive_seq_keep() -> None:
    cells = filled(6, 2)
    cells.pos_set(3, 8)
    cells.pos_set(4, 9)
    cells.seq_add(4, 2)
    cells.seq_add(1, 2)
    assert cells.seq_keep(np.arange(6), 2).tolist() == [True, False, False, False, False, False]
    assert cells.pos.tolist() == [-1, 1, -1, 8, 9, -1]
    assert cells.n_owners.tolist() == [0, 1, 0, 0, 1, 0]
    assert cells.sequences() == (2,)
    cells.check()


def test_only_a_shift_below_zero_leaves_the_extra_data() -> None:
    cells = filled(2, 2)
    cells.ext_set([0, 1], 1, 2, 3)
    cells.pos_add(0, -1)
    cells.rm(1)
    assert cells.ext_tok.tolist() == [3, -1]


def test_the_end_of_the_used_cells_follows_removals() -> None:
    cells = filled(2000, 2000)
    cells.rm(np.arange(1000, 2000))
    assert cells.used_max_p1 == 1000
    cells.rm(np.arange(3, 1000))
    assert (cells.used_max_p1, cells.pos_max(0)) == (3, 2)
    cells.rm([0, 1, 2])
    assert cells.used_max_p1 == 0
    cells.check()


def test_arrays_given_out_are_read_only_and_live() -> None:
    cells = filled(4, 1)
    views = (cells.pos, cells.shift, cells.ext_x, cells.ext_y, cells.ext_tok, cells.n_owners)
    member = cells.member(0)
    for view in (*views, member, cells.member(200)):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    cells.rm(0)
    assert cells.pos[0] == -1
    assert not member[0]


def test_reset_and_resize_start_over() -> None:
    cells = filled(4, 4)
    cells.ext_set(np.arange(4), 1, 1, 1)
    cells.pos_add([1], 1)
    cells.reset()
    assert (cells.n_used, cells.used_max_p1, cells.has_shift, cells.pos_max(0)) == (0, 0, False, -1)
    assert cells.ext_tok.tolist() == [-1] * 4
    cells.check()
    cells.resize(7)
    assert cells.pos.tolist() == [-1] * 7
    assert cells.member(0).shape == (7,)
    cells.check()


def test_questions_about_single_cells() -> None:
    cells = filled(4, 3)
    cells.seq_add(np.int64(1), 5)
    assert (cells.owners(0), cells.owners(1), cells.owners(3)) == ((0,), (0, 5), ())
    assert cells.owner(0) == 0
    for i in (1, 3):
        with pytest.raises(ParamError, match=f"i = {i}"):
            cells.owner(i)
    cells.pos_set(np.int64(3), np.int32(9))
    assert cells.pos.tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize("bad", [1.5, True, np.True_, None, "1", [1], math.nan, -1, 4, 10**30, np.array([0, 1])])
def test_owners_of_a_cell_that_is_no_integer_were_an_index_error(bad: Any) -> None:
    cells = filled(4, 3)
    for call in (cells.owners, cells.owner):
        with pytest.raises(ParamError, match=rf"^i = {re.escape(repr(bad))}: must be an integer from 0 to 3$"):
            call(bad)
    assert cells.owners(np.int64(1)) == (0,)  # type: ignore[arg-type]


BROKEN: dict[str, Callable[[KVCells], Any]] = {
    "set an occupied cell": lambda c: c.pos_set([5, 1], 3),
    "set a negative position": lambda c: c.pos_set(5, -1),
    "set the open end": lambda c: c.pos_set([5, 6], np.array([1, 2**31 - 1], np.int32)),
    "set a cell outside": lambda c: c.pos_set([5, 8], 1),
    "set a negative cell": lambda c: c.pos_set([-1, 5], 1),
    "set a cell twice": lambda c: c.pos_set([5, 6, 5], 1),
    "add a member": lambda c: c.seq_add([1, 2], 0),
    "add to an empty cell": lambda c: c.seq_add([1, 5], 1),
    "remove a non-member": lambda c: c.seq_rm([1, 3], 0),
    "remove from an empty cell": lambda c: c.seq_rm([1, 5], 0),
    "empty an empty cell": lambda c: c.rm([1, 5]),
    "shift an empty cell": lambda c: c.pos_add([1, 5], 1),
    "shift past the end": lambda c: c.pos_add([0, 1], 2**31 - 2),
    "divide an empty cell": lambda c: c.pos_div([1, 5], 2),
    "divide by zero": lambda c: c.pos_div([1], 0),
    "restore too few": lambda c: c.restore([1], c.snapshot([1, 2])),
    "store on an occupied cell": lambda c: c.store(np.array([4, 1]), np.arange(2, dtype=np.int32), ((0,), (0,))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_precondition_is_refused_before_anything_changes(name: str) -> None:
    cells = filled(8, 3)
    cells.pos_set(3, 7)
    cells.seq_add(3, 1)
    before = cells.snapshot(np.arange(8))
    with pytest.raises(ParamError):
        BROKEN[name](cells)
    after = cells.snapshot(np.arange(8))
    assert after.pos.tolist() == before.pos.tolist()
    assert {s: f.tolist() for s, f in after.owners.items()} == {s: f.tolist() for s, f in before.owners.items()}
    assert not cells.has_shift
    cells.check()


@pytest.mark.parametrize("s", [-1, 256, 1000])
def test_sequence_ids_outside_the_limit_are_refused(s: int) -> None:
    cells = filled(4, 2)
    calls: list[Callable[[], Any]] = [
        lambda: cells.member(s),
        lambda: cells.pos_min(s),
        lambda: cells.pos_max(s),
        lambda: cells.seq_n_cells(s),
        lambda: cells.seq_add(0, s),
        lambda: cells.seq_rm(0, s),
        lambda: cells.seq_keep(0, s),
        lambda: cells.store(np.array([3]), np.array([1], np.int32), ((s,),)),
    ]
    for call in calls:
        with pytest.raises(SequenceError, match=str(s)):
            call()
    assert cells.n_used == 2
    cells.check()


def test_a_stream_without_cells_is_refused() -> None:
    with pytest.raises(ParamError, match="n = 0"):
        KVCells(0)


@pytest.mark.parametrize("spoil", ["_pos", "_n_owners", "_shift"])
def test_check_notices_what_went_wrong(spoil: str) -> None:
    cells = filled(4, 2)
    getattr(cells, spoil)[3] = 1
    with pytest.raises(AssertionError):
        cells.check()


@pytest.mark.parametrize("spoil", ["first", "end"])
def test_check_notices_a_span_that_is_not_tight(spoil: str) -> None:
    cells = filled(8, 4)
    cells.seq_rm(0, 0)
    setattr(cells._seqs[0], spoil, {"first": 0, "end": 6}[spoil])
    with pytest.raises(AssertionError, match="span"):
        cells.check()


def test_a_sequence_knows_between_which_cells_it_lies() -> None:
    cells = filled(64, 40)
    cells.seq_add([30, 9, 12], 1)
    spans = [cells.span(1)]
    cells.seq_rm([9, 30], 1)
    spans.append(cells.span(1))
    cells.seq_rm(12, 1)
    spans.append(cells.span(1))
    cells.seq_add(20, 1)
    spans.append(cells.span(1))
    assert spans == [(9, 31), (12, 13), (0, 0), (20, 21)]
    assert (cells.span(0), cells.span(200)) == ((0, 40), (0, 0))
    cells.seq_keep(np.arange(64), 1)
    assert (cells.span(0), cells.span(1)) == ((0, 0), (20, 21))
    cells.check()


def test_a_search_within_a_sequence_passes_over_cells_of_others() -> None:
    cells = filled(64, 40)
    cells.seq_add([9, 12, 13, 30], 1)
    assert cells.find(1, 0, 2**31 - 1).tolist() == [9, 12, 13, 30]
    assert cells.find(1, 10, 30).tolist() == [12, 13]
    cells.seq_rm([9, 30], 1)
    assert (cells.pos_min(1), cells.pos_max(1)) == (12, 13)
    assert cells.find(1, 13, 99).tolist() == [13]
