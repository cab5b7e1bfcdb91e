"""The cell map tells owners apart by letter, so that it reads without colour."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.kv_scene import store_positions

from pykv.cells import CellsView, KVCells
from pykv.cli.cellmap import cell_dump, cell_letters, cell_map
from pykv.memory import KVCache, LayerSpec, MemorySpec


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


def test_dump_has_a_word_a_cell_up_to_the_last_used(cells):
    words = ["0:0{0,1}", "1:1{0,1}", "2:2{0,1}", "3:3{0}", "4:.", "5:5{1}"]
    assert CellsView(cells).words() == words
    assert cell_dump(CellsView(cells)).plain == " ".join(words)


def test_dump_colours_words_by_their_owners(cells):
    dump = cell_dump(CellsView(cells))
    styles = {dump.plain[span.start : span.end]: span.style for span in dump.spans if span.style}
    assert styles["0:0{0,1}"] == styles["2:2{0,1}"]
    assert len({styles[word] for word in ("0:0{0,1}", "3:3{0}", "4:.", "5:5{1}")}) == 4


def test_dump_wraps_between_words(cells):
    console = Console(width=20, file=io.StringIO(), color_system=None)
    console.print(cell_dump(CellsView(cells)))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == ["0:0{0,1} 1:1{0,1}", "2:2{0,1} 3:3{0} 4:.", "5:5{1}"]


def test_dump_of_empty_memory():
    assert CellsView(KVCells(4)).words() == []
    assert cell_dump(CellsView(KVCells(4))).plain == "(all cells are empty)"


def test_dump_is_that_of_the_memory():
    spec = MemorySpec(layers=(LayerSpec(1, 32, 32),))
    with KVCache(spec, n_cells=8, n_seq_max=2) as cache:
        store_positions(cache, [((0, 1), 0), (0, 1), (1, 1)])
        cache.seq_rm(0, 1)
        assert " ".join(cache.cells().words()) == cache.dump() == "0:0{0,1} 1:. 2:1{1}"
