"""Recount one stream's bookkeeping from nothing and compare.

For tests and debugging: reads everything, changes nothing, is slow. Source: spec cells.md section 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pykv.typing import NO_POS, POS_INF

if TYPE_CHECKING:
    from pykv.cells.cell_table import CellTable


def check_cells(cells: CellTable) -> None:
    """Compare every cached figure with a recount.

    Raises
    ------
    AssertionError
        Naming the first figure or cell that is wrong.
    """
    _check_used(cells)
    _check_owners(cells)
    for s in cells.known:
        _check_span(cells, s)
        _check_ends(cells, s)


def _check_used(cells: CellTable) -> None:
    pos, used = cells.pos, np.flatnonzero(cells.pos != NO_POS)
    assert (pos >= NO_POS).all(), f"cell {pos.argmin()} has position {pos.min()}"
    assert (pos < POS_INF).all(), f"cell {pos.argmax()} has position {pos.max()}, the open end"
    assert cells.n_used == used.size, f"n_used is {cells.n_used}, {used.size} cells are occupied"
    first, end = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
    assert cells.used_min == first, f"used_min is {cells.used_min}, the first used cell is {first}"
    assert cells.used_max_p1 == end, f"used_max_p1 is {cells.used_max_p1}, the last used cell ends at {end}"
    stray = np.flatnonzero((pos == NO_POS) & (cells.shift != 0))
    assert stray.size == 0, f"empty cells {stray} have a shift"
    assert cells.has_shift or not cells.shift.any(), "shifts are recorded but has_shift is unset"


def _check_owners(cells: CellTable) -> None:
    owners = np.zeros(cells.n, np.int16)
    for s in cells.known:
        owners += cells.member(s)
    wrong = np.flatnonzero(owners != cells.n_owners)
    assert wrong.size == 0, f"cells {wrong}: n_owners is {cells.n_owners[wrong]}, they have {owners[wrong]}"
    stray = np.flatnonzero((cells.pos == NO_POS) & (owners > 0))
    assert stray.size == 0, f"empty cells {stray} have owners"


def _check_span(cells: CellTable, s: int) -> None:
    members = np.flatnonzero(cells.member(s))
    span = (int(members[0]), int(members[-1]) + 1) if members.size else (0, 0)
    assert cells.span(s) == span, f"sequence {s}: span {cells.span(s)}, its cells lie in {span}"
    offset = cells.offset(s)
    if offset is not None:
        wrong = members[cells.pos[members] != members + offset]
        assert members.size, f"sequence {s}: offset {offset} without cells"
        assert wrong.size == 0, f"sequence {s}: offset {offset}, but cells {wrong} hold {cells.pos[wrong]}"


def _check_ends(cells: CellTable, s: int) -> None:
    held = cells.pos[cells.member(s)]
    lo, hi = (int(held.min()), int(held.max())) if held.size else (NO_POS, NO_POS)
    assert cells.seq_n_cells(s) == held.size, f"sequence {s}: count {cells.seq_n_cells(s)}, cells {held.size}"
    assert cells.pos_min(s) == lo, f"sequence {s}: pos_min {cells.pos_min(s)}, smallest position {lo}"
    assert cells.pos_max(s) == hi, f"sequence {s}: pos_max {cells.pos_max(s)}, largest position {hi}"
