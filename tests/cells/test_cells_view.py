"""What a caller is shown of the cells: all of it, and nothing through which they could be changed."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.cells import CellsView, KVCells


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


def test_nothing_can_be_changed_through_it_and_it_stays_as_it_was() -> None:
    cells, view = shown()
    for array in (view.pos, view.shift, view.token, view.owners):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    view.pos.flags.writeable = True
    view.pos[0] = 7
    assert cells.pos[0] == -1
    cells.rm(np.array([1]))
    assert view.pos[1] == 0
