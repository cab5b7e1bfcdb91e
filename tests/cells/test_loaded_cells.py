"""Cells of a state file put into streams: wherever there is room, in the order of the file."""

from __future__ import annotations

import numpy as np
import pytest
from support.cell_state import state

from pykv.cells import CellStreams, SwaType, Window
from pykv.cells.loaded_cells import LoadedCells, put_all, put_sequence
from pykv.cells.recurrent_cells import RecurrentCells
from pykv.errors import NoSlotError


def cells_at(pos: list[int], ids: list[tuple[int, ...]] | None = None, ext: bool = False) -> LoadedCells:
    ids = [(0,)] * len(pos) if ids is None else ids
    return LoadedCells(
        np.array(pos, np.int32),
        np.arange(3 * len(pos), dtype=np.int32).reshape(-1, 3) if ext else None,
        np.array([len(one) for one in ids], np.int32),
        np.array([s for one in ids for s in one], np.int32),
    )


def streams_of(words: str, **settings: object) -> CellStreams:
    """Return one stream: a word a cell, ``.`` empty, else position and sequences: ``4ab`` of sequences 0 and 1."""
    held = words.split()
    streams = CellStreams(len(held), n_seq_max=4, **settings)
    for i, word in enumerate(held):
        if word != ".":
            streams.cells[0].pos_set(i, int(word.rstrip("abcd")))
            for letter in word.lstrip("0123456789"):
                streams.cells[0].seq_add(i, "abcd".index(letter))
    return streams


@pytest.mark.parametrize(
    ("words", "head", "seq_id", "pos", "expected"),
    [
        (". . . .", 0, 0, [0, 1], "0:0{0} 1:1{0}"),
        ("0b . 1b . .", 0, 0, [7, 8, 9], "0:0{1} 1:7{0} 2:1{1} 3:8{0} 4:9{0}"),
        (". 0b . . 1b", 3, 0, [5, 6, 7], "0:5{0} 1:0{1} 2:6{0} 3:7{0} 4:1{1}"),
        ("0a 1a 0b", 0, 0, [4], "0:4{0} 1:. 2:0{1}"),
        ("0ab 1ab . .", 2, 0, [4, 5], "0:0{1} 1:1{1} 2:4{0} 3:5{0}"),
        ("0a 1a 0b", 0, 0, [], "0:. 1:. 2:0{1}"),
    ],
)
def test_a_sequence_takes_what_is_free_in_the_order_of_the_file(
    words: str, head: int, seq_id: int, pos: list[int], expected: str
) -> None:
    streams = streams_of(words)
    streams.heads[0] = head
    at = put_sequence(streams, seq_id, cells_at(pos))
    streams.check()
    assert streams.dump() == expected
    assert at.tolist() == sorted(at.tolist())
    assert streams.cells[0].pos[at].tolist() == pos


def test_what_a_window_hides_is_taken_last() -> None:
    window = Window(2, SwaType.STANDARD)
    streams = streams_of("0b 1b 2b 3b . .", window=window)
    put_sequence(streams, 0, cells_at([0, 1]))
    assert streams.dump() == "0:0{1} 1:1{1} 2:2{1} 3:3{1} 4:0{0} 5:1{0}"
    put_sequence(streams, 2, cells_at([8, 9]))
    streams.check()
    assert streams.dump() == "0:8{2} 1:9{2} 2:2{1} 3:3{1} 4:0{0} 5:1{0}"


def test_no_room_is_said_and_taken_back() -> None:
    streams = streams_of("0b 1b 0a .")
    before, undo = state(streams), streams.bookmark()
    with pytest.raises(NoSlotError, match="3 cells of a state, and stream 0 has 2 of 4 free"):
        put_sequence(streams, 0, cells_at([0, 1, 2]))
    undo()
    assert state(streams) == before


def test_all_begin_at_the_first_cells() -> None:
    streams = streams_of("0a . 5b . 1a")
    put_all(streams, [cells_at([3, 9, 3], [(0, 2), (), (1,)], ext=True)])
    streams.check()
    assert streams.dump() == "0:3{0,2} 1:9{} 2:3{1}"
    cells = streams.cells[0]
    assert [a[:3].tolist() for a in (cells.ext_x, cells.ext_y, cells.ext_tok)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert streams.heads == [0]
    with pytest.raises(NoSlotError, match="stream 0: 6 cells of a state, and a stream has 5 cells"):
        put_all(streams, [cells_at(list(range(6)))])
    assert streams.dump() == "0:3{0,2} 1:9{} 2:3{1}"


def test_states_of_all_sequences() -> None:
    states = RecurrentCells(4, 4, 2)
    states.place(3, 8)
    states.place_all([(5, (0, 2)), (7, (1,))])
    states.check()
    assert states.dump() == "0:5{0,2} 1:7{1}"
    assert [states.row(s) for s in range(4)] == [0, 1, 0, None]
    assert not states.seq_rm(1, 7), "there is nothing to go back to"
