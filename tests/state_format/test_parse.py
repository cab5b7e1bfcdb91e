"""States held against the memory that shall take them over: each difference is told, with what, where, and how much."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from support.state_bytes import (
    EMPTY,
    EXT,
    F16,
    F32,
    NO_ID,
    OWNED,
    Q8,
    SEQ2,
    SHARED,
    STREAM1,
    Cell,
    Rows,
    StateBytes,
    kv_layout,
    samples,
    states_layout,
)

from pykv.errors import StateError
from pykv.state_format import Dialect, KVLayout, Section, SectionLayout, parse_state

ONE = StateBytes().kv([SEQ2], [F16], [F16])
LAYOUT = kv_layout([F16], [F16])
META, DATA = 8, 8 + 3 * 12
K_HEAD = DATA + 16
V_HEAD = K_HEAD + 12 + 3 * 16


def parse(
    state: StateBytes | bytes, *layouts: SectionLayout, whole: bool = False, **options: object
) -> tuple[Section, ...]:
    data = bytes(state.data) if isinstance(state, StateBytes) else state
    return parse_state(data, 0, layouts, whole=whole, **{"dialect": Dialect.S11, **options})[0]  # type: ignore[arg-type]


def changed(at: int, value: int, form: str = "<i", state: StateBytes = ONE) -> bytes:
    data = bytearray(state.data)
    struct.pack_into(form, data, at, value)
    return bytes(data)


@pytest.mark.parametrize("sample", samples(), ids=lambda s: s.name)
@pytest.mark.parametrize("view", [bytes, bytearray, memoryview], ids=lambda view: view.__name__)
def test_a_state_that_suits_its_memory_is_read(sample, view):
    data = view(b"head" + bytes(sample.state.data) + b"more")
    sections, end = parse_state(data, 4, sample.layouts, whole=sample.whole, stop=len(data) - 4)
    assert end == len(data) - 4
    found = []
    for section in sections:
        parts = [(x.k, x.v) for x in section.streams] if hasattr(section, "streams") else [(section.r, section.s)]
        found += [(rows.span.start - 4, rows.span.nbytes) for part in parts for rows in part[0] + part[1]]
    assert found == sample.state.payloads


DIFFERENT_MEMORIES = [
    (replace(LAYOUT, n_cells=2), "stream 0: number of cells: expected at most 2, found 3", 4),
    (replace(LAYOUT, v_trans=True), "stream 0: V: expected by channel, found by cell", DATA),
    (kv_layout([F16] * 2, [F16] * 2), "number of layers: expected 2, found 1", DATA + 4),
    (replace(LAYOUT, rot=(64, 64)), r"rotated: expected \(64, 64\), found \(0, 0\)", DATA + 8),
    (kv_layout([Rows(8, 34)], [F16]), "K of layer 0: type: expected q8_0, found f16", K_HEAD),
    (kv_layout([Rows(1, 32)], [F16]), "K of layer 0: bytes of a row: expected 32, found 16", K_HEAD + 4),
    (kv_layout([F16], [Rows(30, 16)]), "V of layer 0: type: expected bf16, found f16", V_HEAD),
    (kv_layout([F16], [Rows(1, 24)]), "V of layer 0: bytes of a row: expected 24, found 16", V_HEAD + 4),
]


@pytest.mark.parametrize(("layout", "message", "offset"), DIFFERENT_MEMORIES, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("dialect", [Dialect.S11, None], ids=["told", "found"])
def test_another_memory_is_told_from_the_right_one(layout, message, offset, dialect):
    with pytest.raises(StateError, match=f"{message}, at byte {offset}") as caught:
        parse(ONE, layout, dialect=dialect)
    assert caught.value.offset == offset


DAMAGED = [
    (0, 0, "<i", "number of streams: expected 1 to 256, found 0"),
    (0, 257, "<i", "number of streams: expected 1 to 256, found 257"),
    (4, -1, "<i", "number of cells: expected at most 8, found 4294967295"),
    (META, -1, "<i", "position of cell 0: expected 0 or more, found -1"),
    (META + 24, -(2**31), "<i", "position of cell 2: expected 0 or more, found -2147483648"),
    (META + 16, 0, "<i", "number of ids of cell 1: expected 1, found "),
    (META + 16, 2, "<i", "number of ids of cell 1: expected 1, found 2"),
    (META + 20, 3, "<i", "sequence id 0 of cell 1: expected 2 as in cell 0, found 3"),
    (META + 20, 256, "<i", "sequence id 0 of cell 1: expected 0 to 255, found 256"),
    (META + 32, -1, "<i", "sequence id 0 of cell 2: expected 0 to 255, found -1"),
    (DATA, 2, "<i", "V layout: expected 0 or 1, found 2"),
    (DATA + 4, 2**31, "<I", "number of layers: expected at most 1024, found 2147483648"),
    (DATA + 8, 3, "<i", "rotation of K: expected 0 or a power of two, found 3"),
    (DATA + 12, -1, "<i", "rotation of V: expected 0 or a power of two, found 4294967295"),
    (K_HEAD, 9, "<i", "K of layer 0: type: expected one of 0 .f32., .*, found 9"),
    (
        K_HEAD + 4,
        15,
        "<Q",
        "K of layer 0: bytes of a row of f16: expected 1 to 1099511627776, in blocks of 2, found",
    ),
    (K_HEAD + 4, 0, "<Q", "K of layer 0: bytes of a row of f16: expected 1 to"),
    (K_HEAD + 4, 2**63, "<Q", "K of layer 0: bytes of a row of f16: expected 1 to"),
    (K_HEAD + 4, 2**40, "<Q", f"K of layer 0: 3 rows of {2**40}: expected {3 * 2**40} bytes, found the end after 108"),
]


@pytest.mark.parametrize(("at", "value", "form", "message"), DAMAGED)
def test_a_damaged_field_is_told(at, value, form, message):
    with pytest.raises(StateError, match=message) as caught:
        parse(changed(at, value, form), LAYOUT)
    assert caught.value.offset is not None
    assert f"at byte {caught.value.offset}" in str(caught.value)
    assert at <= caught.value.offset <= at + 12


def test_fields_of_v_by_channel_are_told():
    state = StateBytes().kv([SEQ2], [F16], [F16], v_trans=True)
    layout = kv_layout([F16], [F16], v_trans=True)
    for at, value, message in [
        (V_HEAD, 8, "type of V by channel: expected one without blocks, found q8_0"),
        (V_HEAD + 4, 4, "bytes of an element of f16: expected 2, found 4"),
        (V_HEAD + 8, 0, "number of channels: expected 1 or more, found 0"),
        (
            V_HEAD + 8,
            2**31 - 1,
            "2147483647 channels of 3 elements: expected 12884901882 bytes, found the end",
        ),
        (V_HEAD + 8, 7, "bytes of a row: expected 16, found 14"),
    ]:
        with pytest.raises(StateError, match=message):
            parse(changed(at, value, state=state), layout)
    with pytest.raises(StateError, match="V of layer 0: type: expected bf16, found f16"):
        parse(state, kv_layout([F16], [Rows(30, 16, 2)], v_trans=True))


def test_bytes_behind_the_state_are_refused_unless_they_are_allowed():
    data = bytes(ONE.data) + b"xy"
    with pytest.raises(StateError, match=f"state: expected its end, found 2 more bytes, at byte {len(ONE.data)}"):
        parse(data, LAYOUT)
    assert parse_state(data, 0, [LAYOUT], whole=False, exact=False)[1] == len(ONE.data)


def test_ids_of_a_whole_state():
    layout = kv_layout([F16], [F16])
    for cells, message, offset in [
        ([Cell(0, (0, 4))], "sequence id 1 of cell 0: expected less than n_seq_max 4, found 4", 8 + 12),
        (
            [Cell(0, (1,)), Cell(1, (2, 2))],
            "sequence id 1 of cell 1: expected more than 2, the id before it",
            32,
        ),
        ([Cell(0, (1,)), Cell(1, (3, 2))], "sequence id 1 of cell 1: expected more than 3", 32),
        ([Cell(0, (*range(256), 3))], "number of ids of cell 0: expected at most 256, found 257", 12),
    ]:
        with pytest.raises(StateError, match=message) as caught:
            parse(StateBytes().kv([cells], [F16], [F16]), layout, whole=True)
        assert caught.value.offset == offset
    whole = StateBytes().kv([STREAM1, STREAM1], [F16], [F16])
    with pytest.raises(StateError, match="sequence id 0 of cell 0: expected 0, whose stream this is, found 1"):
        parse(whole, kv_layout([F16], [F16], 2), whole=True)


def test_a_sequence_has_cells_in_one_stream():
    state = StateBytes().kv([[], SEQ2, [], STREAM1], [F16], [F16])
    with pytest.raises(StateError, match="cells of stream 3: expected 0, since another one has some, found 2"):
        parse(state, kv_layout([F16], [F16], 4))


def test_a_sequence_without_cells_is_a_state():
    (section,) = parse(StateBytes().kv([[], []], [F16], [F16]), kv_layout([F16], [F16], 2))
    assert [stream.cells.n for stream in section.streams] == [0, 0]
    assert [stream.v_trans for stream in section.streams] == [None, None]


def test_a_source_sequence_that_the_memory_does_not_have_is_no_fault():
    (section,) = parse(StateBytes().kv([[Cell(0, (200,))]], [F16], [F16]), LAYOUT)
    assert section.streams[0].cells.ids.tolist() == [200]


STATES = states_layout(3, [F32], [F32])


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([Cell(1, (0,)), Cell(2, (1, 0))], "sequence id 1 of cell 1: expected more than 1"),
        ([Cell(1, (0, 2)), Cell(2, (2,))], "sequence id 0 of cell 1: expected one that has no state yet, found 2"),
        ([Cell(1, (0,)), Cell(2, ())], "number of ids of cell 1: expected 1 or more, found 0"),
        ([Cell(1, (0,)), Cell(-1, (1,))], "position of cell 1: expected 0 or more, found -1"),
        ([Cell(1, (4,))], "sequence id 0 of cell 0: expected less than n_seq_max 4, found 4"),
        ([Cell(1, (i,)) for i in range(5)], "number of cells: expected at most 4, found 5"),
    ],
)
def test_cells_of_a_whole_states_section(cells, message):
    with pytest.raises(StateError, match=message):
        parse(StateBytes().states(cells, 3, [F32], [F32]), STATES, whole=True)


def test_cells_of_the_states_of_one_sequence():
    with pytest.raises(StateError, match="number of ids of cell 0: expected 0, found 1"):
        parse(StateBytes().states(STREAM1[:1], 3, [F32], [F32]), STATES)
    with pytest.raises(StateError, match="number of cells: expected 1 or 0, for one sequence, found 2"):
        parse(StateBytes().states(NO_ID * 2, 3, [F32], [F32]), STATES)
    (section,) = parse(StateBytes().states([], 3, [F32], [F32]), STATES)
    assert section.cells.n == 0
    assert [rows.span.nbytes for rows in section.r + section.s] == [0, 0]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (states_layout(4, [F32], [F32]), "number of layers: expected 4, found 3"),
        (states_layout(3, [F16], [F32]), "R of layer 0: type: expected f16, found f32"),
        (states_layout(3, [F32], [Rows(0, 20)]), "S of layer 0: bytes of a row: expected 20, found 24"),
        (states_layout(3, [F32], [EMPTY]), "S of layer 0: bytes of a row: expected 0, found 24"),
        (states_layout(3, [F32], []), "expected its end, found 36 more bytes"),
    ],
)
def test_another_recurrent_memory(layout, message):
    with pytest.raises(StateError, match=message):
        parse(StateBytes().states(NO_ID, 3, [F32], [F32]), layout)


def test_states_that_lie_by_channel_are_refused():
    data = changed(12, 1, state=StateBytes().states(NO_ID, 3, [F32], [F32]))
    with pytest.raises(StateError, match="layout of S: expected 0, row by row, found 1, at byte 12"):
        parse(data, STATES)


def test_the_second_section_is_held_against_the_second_part():
    state = StateBytes().kv([SHARED], [F16], [F16]).kv([SHARED], [F32], [F16])
    base = len(StateBytes().kv([SHARED], [F16], [F16]).data)
    with pytest.raises(StateError, match="K of layer 0: type: expected f16, found f32") as caught:
        parse(state, LAYOUT, LAYOUT, whole=True)
    assert caught.value.offset > base


def test_the_dialect_is_found_where_nothing_says_it():
    for v_trans in (False, True):
        for rot in (None, (0, 0), (64, 64)):
            state = StateBytes().kv([SEQ2], [F16, Q8], [F16, F16], v_trans=v_trans, rot=rot)
            layout = kv_layout([F16, Q8], [F16, F16], v_trans=v_trans, rot=rot or (0, 0))
            (section,) = parse(state, layout, dialect=None)
            assert section.streams[0].rot == rot


def test_of_a_damaged_state_without_a_dialect_the_furthest_error_is_told():
    state = StateBytes().kv([SEQ2], [F16, F16], [F16, F16], rot=None)
    damaged = bytes(state.data[:-1])
    with pytest.raises(StateError, match="V of layer 1: 3 rows of 16: expected 48 bytes, found the end after 47"):
        parse(damaged, kv_layout([F16] * 2, [F16] * 2), dialect=None)


def test_what_can_be_converted_is_no_fault_where_that_is_meant():
    state = StateBytes().kv([SEQ2], [Rows(1, 64, 2)], [Rows(1, 64, 2)])
    other: KVLayout = kv_layout([Rows(8, 34)], [Rows(0, 128, 4)], 4, v_trans=True, rot=(64, 0))
    (section,) = parse(state, other, strict=False)
    assert section.streams[0].v_trans is False
    assert [rows.dtype for rows in section.streams[0].k + section.streams[0].v] == [1, 1]
    ids = StateBytes().kv([[Cell(p, (0,)) for p in range(8)]], [F16], [F16])
    streams = replace(LAYOUT, n_stream=4, n_cells=3)
    assert parse(ids, streams, whole=True, strict=False)[0].streams[0].cells.n == 8
    for layout, message in [
        (kv_layout([Rows(8, 68)], [Rows(1, 64)]), "K of layer 0: elements of a row: expected 64, found 32"),
        (kv_layout([Rows(8, 34)] * 2, [Rows(8, 34)] * 2), "number of layers: expected 2, found 1"),
        (replace(other, n_cells=2), "number of cells: expected at most 2, found 3"),
    ]:
        with pytest.raises(StateError, match=message):
            parse(state, layout, strict=False)
    with pytest.raises(StateError, match="number of streams: expected 4, found 1"):
        parse(ids, replace(LAYOUT, n_stream=4), whole=True)
    beyond = StateBytes().kv([[Cell(0, (7,))]], [F16], [F16])
    with pytest.raises(StateError, match="sequence id 0 of cell 0: expected less than n_seq_max 4, found 7"):
        parse(beyond, LAYOUT, whole=True, strict=False)


def test_how_many_streams_lie_beside_a_sequence_is_no_matter():
    for n_stream, state in ((4, ONE), (1, StateBytes().kv([[], SEQ2, []], [F16], [F16]))):
        (section,) = parse(state, replace(LAYOUT, n_stream=n_stream))
        assert [cells.pos.tolist() for cells in (one.cells for one in section.streams) if cells.n] == [[5, 6, 7]]


def test_cells_of_many_lengths_are_read_like_cells_of_one():
    """More of them than are looked at in one go."""
    cells = [Cell(p, tuple(range(p % 4))) for p in range(9000)]
    state = StateBytes().kv([cells], [Rows(1, 2)], [Rows(1, 2)])
    layout = replace(kv_layout([Rows(1, 2)], [Rows(1, 2)]), n_cells=9000)
    found = parse(state, layout, whole=True)[0].streams[0].cells
    assert found.n_ids.tolist() == [p % 4 for p in range(9000)]
    assert found.ids.tolist() == [i for p in range(9000) for i in range(p % 4)]
    assert found.pos.tolist() == list(range(9000))
    assert found.end == len(state.data) - 2 * (12 + 2 * 9000) - 16
    with_ext = [Cell(p, tuple(range(p % 3)), (p, -p, 7)) for p in range(9000)]
    state = StateBytes().kv([with_ext], [Rows(1, 2)], [Rows(1, 2)])
    found = parse(state, replace(layout, has_ext=True), whole=True)[0].streams[0].cells
    assert found.ext.tolist() == [[p, -p, 7] for p in range(9000)]
    assert len(EXT) == 3
    assert found.ids.tolist() == [i for p in range(9000) for i in range(p % 3)]


def test_a_whole_states_section_is_read():
    (section,) = parse(StateBytes().states(OWNED, 3, [F32], [F32]), STATES, whole=True)
    assert section.n_layer == 3
    assert section.cells.pos.tolist() == [3, 5]
    assert section.cells.n_ids.tolist() == [2, 1]
    assert section.cells.ids.tolist() == [0, 2, 1]
