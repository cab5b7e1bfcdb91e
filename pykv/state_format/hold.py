"""Holds what a state says against what a memory expects: the first difference is an error that names its byte.

Source: spec state_format.md sections 4.2 and 6.
"""

from __future__ import annotations

from itertools import zip_longest

from pykv.errors import StateError
from pykv.state_format.cursor import mismatch
from pykv.state_format.element import ELEMENTS, type_name
from pykv.state_format.layout import KVLayout, RowsLayout, StatesLayout
from pykv.state_format.read_cells import bad_id
from pykv.state_format.records import CellRecords, KVSection, RowsRecord, StatesSection, StreamRecords
from pykv.state_format.structure import HEAD_NBYTES


def hold_kv(section: KVSection, layout: KVLayout, *, whole: bool, strict: bool = True) -> None:
    """Refuse what a KV cache cannot take over as it is.

    Parameters
    ----------
    strict : if False, accept what can be converted: V by the other order, other types of the same width, other
        rotations, and another number of streams. How many cells each then gets is not known here. Of one sequence,
        that number is no matter: all its cells are in one stream, whatever lies beside it.

    Raises
    ------
    StateError : names the first difference.
    """
    n_stream = len(section.streams)
    # differs from llama.cpp: one sequence is held against one stream alone, because the bytes of its cells are the same
    # in a context with more or fewer streams beside it, which llama.cpp refuses
    if n_stream != layout.n_stream and strict and whole:
        raise mismatch("KV section: number of streams", layout.n_stream, n_stream, section.span.start)
    for s, stream in enumerate(section.streams):
        what = f"KV section: stream {s}"
        if strict or not whole:
            _hold_cells(stream.cells, layout.n_cells, what)
        if whole:
            _hold_ids(stream.cells, None if n_stream == 1 else s, layout.n_seq_max, what)
        if stream.cells.n:
            _hold_rows_of_stream(stream, layout, what, strict=strict)


def hold_states(section: StatesSection, layout: StatesLayout, *, whole: bool, strict: bool = True) -> None:
    """Refuse what a recurrent memory cannot take over as it is; see `hold_kv`."""
    what = "states section"
    if whole:
        _hold_ids(section.cells, None, layout.n_seq_max, what)
    _hold_cells(section.cells, layout.n_cells, what)
    if section.n_layer != layout.n_layer:
        raise mismatch(f"{what}: number of layers", layout.n_layer, section.n_layer, section.cells.end + 4)
    _hold_all_rows(section.r, layout.r, f"{what}: R", by_channel=False, strict=strict)
    _hold_all_rows(section.s, layout.s, f"{what}: S", by_channel=False, strict=strict)


def _hold_cells(cells: CellRecords, n_cells: int, what: str) -> None:
    if cells.n > n_cells:
        raise mismatch(f"{what}: number of cells", f"at most {n_cells}", cells.n, cells.start - 4)


def _hold_ids(cells: CellRecords, own: int | None, n_seq_max: int, what: str) -> None:
    """Refuse ids that the memory does not have, or that do not belong into their stream."""
    if own is not None and (cells.ids != own).any():
        raise bad_id(cells, int((cells.ids != own).argmax()), f"{own}, whose stream this is", what)
    if (cells.ids >= n_seq_max).any():
        raise bad_id(cells, int((cells.ids >= n_seq_max).argmax()), f"less than n_seq_max {n_seq_max}", what)


def _hold_rows_of_stream(stream: StreamRecords, layout: KVLayout, what: str, *, strict: bool) -> None:
    at = stream.cells.end
    if strict and stream.v_trans != layout.v_trans:
        raise mismatch(f"{what}: V", _order(layout.v_trans), _order(bool(stream.v_trans)), at)
    if len(stream.k) != len(layout.k):
        raise mismatch(f"{what}: number of layers", len(layout.k), len(stream.k), at + 4)
    if strict and stream.rot is not None and stream.rot != layout.rot:
        raise mismatch(f"{what}: widths by which K and V are rotated", layout.rot, stream.rot, at + 8)
    _hold_all_rows(stream.k, layout.k, f"{what}: K", by_channel=False, strict=strict)
    _hold_all_rows(stream.v, layout.v, f"{what}: V", by_channel=layout.v_trans, strict=strict)
    if not strict and stream.rot is not None:  # else it is that of the memory
        _hold_rotation(stream.rot[0], stream.k, f"{what}: rotation of K", at + 8)
        _hold_rotation(stream.rot[1], stream.v, f"{what}: rotation of V", at + 12)


def _hold_rotation(width: int, rows: tuple[RowsRecord, ...], what: str, at: int) -> None:
    """Refuse a rotation that cannot be undone, since rows are no whole number of such blocks."""
    if width and any((ELEMENTS[one.dtype].width(one.row_bytes) or 0) % width for one in rows):
        raise mismatch(what, "0 or a width that divides every row", width, at)


def _order(by_channel: bool) -> str:
    return "by channel" if by_channel else "by cell"


def _hold_all_rows(
    found: tuple[RowsRecord, ...], expected: tuple[RowsLayout, ...], what: str, *, by_channel: bool, strict: bool
) -> None:
    for i, (rows, layout) in enumerate(zip_longest(found, expected)):
        if rows is None or layout is None:
            raise StateError(f"{what}: expected {len(expected)} tensors, found {len(found)}")
        if strict:
            _hold_rows(rows, layout, f"{what} of layer {i}", by_channel=by_channel)
        else:
            _hold_width(rows, layout, f"{what} of layer {i}")


def _hold_rows(rows: RowsRecord, layout: RowsLayout, what: str, *, by_channel: bool) -> None:
    at = rows.span.start - HEAD_NBYTES
    if rows.dtype != layout.dtype:
        raise mismatch(f"{what}: type", type_name(layout.dtype), type_name(rows.dtype), at)
    if by_channel and rows.elem_bytes != layout.elem_bytes:
        raise mismatch(f"{what}: bytes of an element", layout.elem_bytes, rows.elem_bytes, at + 4)
    if rows.row_bytes != layout.row_bytes:
        raise mismatch(f"{what}: bytes of a row", layout.row_bytes, rows.row_bytes, at + (8 if by_channel else 4))


def _hold_width(rows: RowsRecord, layout: RowsLayout, what: str) -> None:
    """Refuse rows of another number of elements; what their type is does not matter."""
    width = ELEMENTS[rows.dtype].width(rows.row_bytes)
    known = ELEMENTS.get(layout.dtype)
    expected = known.width(layout.row_bytes) if known else None
    if expected is None and rows.dtype == layout.dtype:
        width, expected = rows.row_bytes, layout.row_bytes
    if width != expected:
        raise mismatch(f"{what}: elements of a row", expected, width, rows.span.start - HEAD_NBYTES + 4)
