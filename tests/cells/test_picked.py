"""Cells that an operation names: what is one run, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.cells import KVCells
from pykv.cells.picked import NOTHING, Picked, pick
from pykv.errors import ParamError


def cells_of(picked: Picked) -> list[int]:
    return np.arange(100)[picked.at].tolist()


@pytest.mark.parametrize(
    ("named", "is_run"),
    [
        (5, True),
        (np.int64(5), True),
        ([5], True),
        ([5, 6, 7], True),
        (np.arange(20, 90), True),
        ([5, 6, 8], False),
        ([6, 5], False),
        ([5, 9, 7], False),  # as many as from first to last, without being a run
        ([9, 8, 7], False),
        ([99, 0, 1], False),
    ],
)
def test_only_cells_that_follow_one_another_are_a_run(named: int | list[int], is_run: bool) -> None:
    picked = pick(named, 100)
    listed = np.atleast_1d(named).tolist()
    assert picked.idxs.tolist() == cells_of(picked) == listed
    assert (picked.first, picked.last, picked.n) == (min(listed), max(listed), len(listed))
    assert isinstance(picked.at, slice) is is_run


@pytest.mark.parametrize("named", [[-1], [100], [3, 100], [-1, 3], [4, 4], [1, 2, 3, 2], [7, 6, 6]])
def test_cells_that_do_not_exist_or_are_named_twice_are_refused(named: list[int]) -> None:
    with pytest.raises(ParamError, match="idxs"):
        pick(named, 100)


def test_a_part_of_the_cells() -> None:
    picked = pick([3, 4, 5, 9], 100)
    assert picked.where(np.array([True] * 4)) is picked
    assert picked.where(np.array([False] * 4)) is NOTHING
    part = picked.where(np.array([False, True, True, False]))
    assert (part.at, part.first, part.last) == (slice(4, 6), 4, 5)
    assert (cells_of(NOTHING), NOTHING.n) == ([], 0)
    assert pick([], 100) is NOTHING


def test_a_sequence_stays_aligned_until_its_positions_no_longer_follow_its_cells() -> None:
    cells = KVCells(64)
    assert cells.offset(0) is None
    cells.store(np.arange(10, 30), np.arange(100, 120, dtype=np.int32), ((0,),) * 20)
    assert cells.offset(0) == 90
    cells.seq_rm([12, 13, 10, 29], 0)
    assert (cells.offset(0), cells.pos_min(0), cells.pos_max(0)) == (90, 101, 118)
    assert cells.find(0, 101, 106).tolist() == [11, 14, 15]
    cells.store(np.array([12]), np.array([102], np.int32), ((0,),))
    assert cells.offset(0) == 90
    cells.store(np.array([40]), np.array([119], np.int32), ((0,),))
    assert cells.offset(0) is None
    assert (cells.pos_min(0), cells.pos_max(0), cells.find(0, 118, 200).tolist()) == (101, 119, [28, 40])
    cells.rm(cells.find(0, 0, 1000))
    cells.store(np.array([7, 9]), np.array([1, 3], np.int32), ((0,), (0,)))
    assert cells.offset(0) == -6
    cells.check()


def test_a_shifted_sequence_is_looked_through() -> None:
    cells = KVCells(16)
    cells.store(np.arange(8), np.arange(8, dtype=np.int32), ((0,),) * 8)
    cells.pos_add(np.arange(4, 8), 5)
    assert cells.offset(0) is None
    assert (cells.pos_max(0), cells.find(0, 3, 10).tolist()) == (12, [3, 4])
    cells.check()


def test_a_shift_of_the_whole_sequence_or_back_leaves_it_aligned() -> None:
    cells = KVCells(16)
    cells.store(np.array([2, 3, 4, 6]), np.array([2, 3, 4, 6], np.int32), ((0,),) * 4)
    cells.pos_add([4, 6], 3)
    assert (cells.pos_max(0), cells.offset(0)) == (9, None)
    cells.pos_add([4, 6], -3)
    assert (cells.pos_max(0), cells.offset(0)) == (6, 0)
    cells.pos_add([2, 3, 4, 6], 5)
    assert (cells.pos_min(0), cells.offset(0)) == (7, 5)
    cells.pos_add(3, 1)
    assert (cells.pos_min(0), cells.pos_max(0), cells.offset(0)) == (7, 11, None), "only the ends are where they were"
    cells.check()


def test_check_notices_a_wrong_offset() -> None:
    cells = KVCells(8)
    cells.store(np.array([1, 2, 3, 5]), np.array([1, 3, 2, 5], np.int32), ((0,),) * 4)
    cells._seqs[0].offset = 0
    with pytest.raises(AssertionError, match="offset"):
        cells.check()


def test_what_was_picked_elsewhere_is_held_against_the_bounds_again():
    picked = pick([3, 4], 100)
    assert pick(picked, 5) is picked
    with pytest.raises(ParamError, match="cell 4 is outside 0 to 3"):
        pick(picked, 4)
