"""The cell map tells owners apart by letter, so that it reads without colour."""

from __future__ import annotations

import pytest

from pykv.cells import CellsView, KVCells
from pykv.cli.cellmap import cell_letters, cell_map


@pytest.fixture
def cells():
    """Cells 0-2 shared by 0 and 1, 3 of 0 alone, 4 empty, 5 of 1 alone, 6 and 7 empty."""
    cells = KVCells(8)
    for i, owners in {0: (0, 1), 1: (0, 1), 2: (0, 1), 3: (0,), 5: (1,)}.items():
        cells.pos_set(i, i)
        for owner in owners:
            cells.seq_add(i, owner)
    return cells


def test_letters_tell_owners_apart(cells):
    assert cell_letters(CellsView(cells)) == "###A.B.."


def test_rows_are_cut_at_the_width_and_numbered(cells):
    assert cell_map(CellsView(cells), width=4).plain.splitlines() == ["     0 ###A", "     4 .B.."]


def test_empty_rows_at_the_end_are_counted_not_drawn(cells):
    cells.rm(5)
    assert cell_map(CellsView(cells), width=4).plain.splitlines() == ["     0 ###A", "       (4 more empty cells)"]


def test_empty_memory_draws_one_row():
    assert cell_map(CellsView(KVCells(256)), width=64).plain.splitlines() == [
        "     0 " + 64 * ".",
        "       (192 more empty cells)",
    ]
