"""Heads of states against the tables of the format, written field by field in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    Cell,
    Rows,
    StateBytes,
    kv_layout,
    states_layout,
)

from pykv.state_format import (
    CellRecords,
    Dialect,
    KVLayout,
    RowsLayout,
    encode_cells,
    kv_section_head,
    kv_stream_heads,
    parse_state,
    states_heads,
)


def records(cells: list[Cell]) -> CellRecords:
    def words(values: object) -> np.ndarray:
        return np.array(list(values), np.int32)  # type: ignore[call-overload]

    ext = words([each.ext for each in cells]).reshape(-1, 3) if cells and cells[0].ext else None
    ids = words([i for each in cells for i in each.ids])
    return CellRecords(words(each.pos for each in cells), words(len(each.ids) for each in cells), ids, ext)


def interleave(heads, payload: bytes) -> bytes:
    """Put the payload, cut where the tensors are, between the heads."""
    data, at = heads.first, 0
    for head in heads.rows:
        row_bytes = int.from_bytes(head[4:], "little")
        if int.from_bytes(head[8:], "little"):  # by channel: two numbers of four bytes
            row_bytes = int.from_bytes(head[4:8], "little") * int.from_bytes(head[8:], "little")
        n = row_bytes * int.from_bytes(heads.first[:4], "little")
        data, at = data + head + payload[at : at + n], at + n
    assert at == len(payload)
    return data


def payloads(state: StateBytes) -> bytes:
    return b"".join(bytes(state.data[at : at + n]) for at, n in state.payloads)


@pytest.mark.parametrize(
    ("dialect", "rot"), [(Dialect.S10, None), (Dialect.S11, (0, 0)), (Dialect.S11, (64, 128))], ids=str
)
@pytest.mark.parametrize("cells", [SEQ2, SHARED, EXT, [Cell(1, ())], []], ids=["one", "shared", "ext", "no id", "none"])
@pytest.mark.parametrize("v_trans", [False, True])
def test_a_stream_is_written_as_the_table_says(cells, dialect, rot, v_trans):
    k, v = [F16, Q8], [F16, F32]
    expected = StateBytes().kv([cells], k, v, v_trans=v_trans, rot=rot)
    layout = kv_layout(k, v, v_trans=v_trans, rot=rot or (0, 0), has_ext=cells is EXT)
    heads = kv_stream_heads(records(cells), layout, dialect)
    assert kv_section_head(1) + interleave(heads, payloads(expected)) == bytes(expected.data)


def test_the_bytes_of_a_small_section_one_by_one():
    heads = kv_stream_heads(records([Cell(5, (2,))]), kv_layout([F16], [Q8], rot=(0, 64)))
    words = [1, 5, 1, 2, 0, 1, 0, 64]
    assert heads.first == b"".join(w.to_bytes(4, "little") for w in words)
    assert heads.rows == (
        b"\x01\0\0\0" + b"\x10" + bytes(7),
        b"\x08\0\0\0" + b"\x44" + bytes(7),
    )
    assert kv_section_head(3) == b"\3\0\0\0"


@pytest.mark.parametrize(("cells", "s"), [(OWNED, [F32, F32]), (NO_ID, [EMPTY, EMPTY]), ([], [F32, F32])])
def test_a_states_section_is_written_as_the_table_says(cells, s):
    expected = StateBytes().states(cells, 7, [F32, F16], s)
    heads = states_heads(records(cells), states_layout(7, [F32, F16], s))
    assert interleave(heads, payloads(expected)) == bytes(expected.data)


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("n_stream", [1, 4])
@pytest.mark.parametrize("v_trans", [False, True])
def test_the_size_of_a_sequence_state_is_the_formula_of_the_older_dialect(n, n_stream, v_trans):
    n_layer, row_k, row_v, width = 5, 68, 16, 8
    layout = kv_layout([Q8] * n_layer, [F16] * n_layer, v_trans=v_trans)
    empty = kv_stream_heads(records([]), layout, Dialect.S10)
    heads = kv_stream_heads(records([Cell(p, (0,)) for p in range(n)]), layout, Dialect.S10)
    size = 8 + 4 + heads.nbytes + (n_stream - 1) * empty.nbytes + n * n_layer * (row_k + row_v)
    v = n_layer * (12 + width * n * 2) if v_trans else n_layer * (12 + n * row_v)
    by_formula = 8 + 4 + 4 * n_stream + n * 12 + 8 + n_layer * (12 + n * row_k) + v
    assert size == (by_formula if n else 12 + 4 * n_stream)


def test_cells_that_do_not_add_up_are_refused():
    pos = np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match="2 cells with 2 counts of ids and 1 ids"):
        encode_cells(CellRecords(pos, np.ones(2, np.int32), np.zeros(1, np.int32)))
    with pytest.raises(ValueError, match="ext False for a layout with has_ext True"):
        kv_stream_heads(records(SEQ2), kv_layout([F16], [F16], has_ext=True))


positions = st.integers(0, 2**31 - 1)
id_sets = st.sets(st.integers(0, 255), max_size=6).map(lambda ids: tuple(sorted(ids)))
exts = st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 3)
row_kinds = st.sampled_from([F16, F32, Q8, Rows(2, 36), Rows(30, 6, 2)])


@st.composite
def cell_lists(draw: st.DrawFn, has_ext: bool, ids: st.SearchStrategy[tuple[int, ...]]) -> list[Cell]:
    cells = st.builds(Cell, positions, ids, exts if has_ext else st.none())
    return draw(st.lists(cells, max_size=12))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_encoded_is_what_is_parsed(data):
    has_ext, v_trans, whole = (data.draw(st.booleans()) for _ in range(3))
    rot = data.draw(st.sampled_from([None, (0, 0), (64, 32)]))
    k = data.draw(st.lists(row_kinds, max_size=3))
    v = [each if each.elem_bytes or not v_trans else F16 for each in data.draw(st.sampled_from([k, []]))]
    ids = id_sets if whole else st.just((data.draw(st.integers(0, 255)),))
    cells = data.draw(cell_lists(has_ext, ids))
    layout = KVLayout(1, 12, 256, _layout(k), _layout(v), v_trans, rot or (0, 0), has_ext)
    expected = StateBytes().kv([cells], k, v, v_trans=v_trans, rot=rot)
    dialect = Dialect.S11 if rot else Dialect.S10
    heads = kv_stream_heads(records(cells), layout, dialect)
    written = kv_section_head(1) + interleave(heads, payloads(expected))
    assert written == bytes(expected.data)
    (section,), end = parse_state(b"before" + written, 6, [layout], whole=whole, dialect=dialect)
    (stream,) = section.streams
    assert end == 6 + len(written)
    assert told(stream.cells) == cells
    assert [(rows.span.start - 6, rows.span.nbytes) for rows in stream.k + stream.v] == expected.payloads


def _layout(rows: list[Rows]) -> tuple[RowsLayout, ...]:
    return tuple(RowsLayout(*each) for each in rows)


def told(cells: CellRecords) -> list[Cell]:
    """Return cells as they were written, taken apart one after the other."""
    ids = cells.ids.tolist()
    found = []
    for i, n in enumerate(cells.n_ids.tolist()):
        ext = None if cells.ext is None else tuple(cells.ext[i].tolist())
        found.append(Cell(int(cells.pos[i]), tuple(ids[:n]), ext))
        del ids[:n]
    return found


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_states_that_are_encoded_are_those_that_are_parsed(data):
    owners = data.draw(st.lists(st.integers(0, 4), min_size=8, max_size=8))
    held = [tuple(i for i in range(8) if owners[i] == cell) for cell in range(4)]
    cells = [Cell(data.draw(positions), ids) for ids in held if ids]
    r, s = [F32, F16], data.draw(st.sampled_from([[F32, F32], [EMPTY, EMPTY], []]))
    expected = StateBytes().states(cells, 9, r, s)
    layout = states_layout(9, r, s)
    layout = type(layout)(layout.n_cells, 8, layout.n_layer, layout.r, layout.s)
    (section,), end = parse_state(bytes(expected.data), 0, [layout], whole=True)
    assert end == len(expected.data)
    assert told(section.cells) == cells
    assert [tuple(rows.span) for rows in section.r + section.s] == expected.payloads
