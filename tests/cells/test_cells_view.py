"""What a caller is shown of the cells: all of it, and nothing through which they could be changed."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.cells import CellsView, KVCells
from pykv.errors import ParamError


def shown() -> tuple[KVCells, CellsView]:
    cells = KVCells(6)
    cells.pos_set(np.array([1, 2, 4]), np.array([0, 1, 5], np.int32))
    cells.seq_add(np.array([1, 2]), 0)
    cells.seq_add(np.array([2, 4]), 2)
    cells.pos_add(np.array([4]), -2)
    return cells, CellsView(cells)


def test_positions_shifts_and_owners_of_every_cell() -> None:
    _, view = shown()
    assert view.pos.tolist() == [-1, 0, 1, -1, 3, -1]
    assert view.shift.tolist() == [0, 0, 0, 0, -2, 0]
    assert view.owners.tolist() == [
        [False, True, True, False, False, False],
        [False] * 6,
        [False, False, True, False, True, False],
    ]
    assert [view.owners_of(i) for i in range(6)] == [(), (0,), (0, 2), (), (2,), ()]
    assert (view.n_used, len(view)) == (3, 6)


def test_an_empty_stream_has_no_sequences() -> None:
    view = CellsView(KVCells(4))
    assert view.owners.shape == (0, 4)
    assert view.n_used == 0


def test_nothing_can_be_changed_through_it_and_it_follows_what_changes() -> None:
    cells, view = shown()
    for array in (view.pos, view.shift, view.token, view.n_owners, view.member(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    pos, mine = view.pos, view.member(0)
    cells.rm(np.array([1]))
    assert (pos[1], mine.tolist(), view.n_used) == (-1, [False, False, True, False, False, False], 2)
    assert view.sequences == (0, 2)


@pytest.mark.parametrize("cell", [-1, 6, 1.0])
def test_owners_of_a_cell_that_is_none(cell: float) -> None:
    _, view = shown()
    with pytest.raises(ParamError, match="cell = "):
        view.owners_of(cell)
