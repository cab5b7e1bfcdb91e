"""Reads sections as they describe themselves: what is impossible is refused, what does not suit a memory is not.

Source: spec state_format.md sections 3, 4 and 6.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pykv.state_format.cursor import Cursor, mismatch
from pykv.state_format.dialect import Dialect
from pykv.state_format.element import ELEMENTS
from pykv.state_format.read_cells import MAX_CELLS, bad_id, read_cells
from pykv.state_format.records import CellRecords, KVSection, RowsRecord, Span, StatesSection, StreamRecords
from pykv.typing import MAX_SEQ

MAX_LAYERS = 1024
"""More than any model has; a file that says more is damaged."""

MAX_ROW = 2**40
"""More bytes than any row has: of a state without cells, nothing else bounds them."""

HEAD_NBYTES = 12
"""Bytes before the payload of a tensor: its type, and the length of a row or of an element and of a column."""


class KVShape(NamedTuple):
    """What the bytes of a KV section do not say of themselves.

    Attributes
    ----------
    has_ext : whether x, y and token of each cell are listed.
    n_k : how many tensors of K there must be; None = as many as it says.
    n_v : how many of V; None = one for each of K.
    n_cells : how many cells a stream may have.
    """

    has_ext: bool = False
    n_k: int | None = None
    n_v: int | None = None
    n_cells: int = MAX_CELLS


class StatesShape(NamedTuple):
    """How many tensors of R and of S a states section has, which its bytes do not say; and cells, at most."""

    n_r: int
    n_s: int
    n_cells: int = MAX_CELLS


SectionShape = KVShape | StatesShape


def read_kv(cursor: Cursor, shape: KVShape, dialect: Dialect, *, whole: bool) -> KVSection:
    """Read what one KV cache wrote.

    Parameters
    ----------
    whole : the state of all sequences, not of one.

    Raises
    ------
    StateError : it ends early, or says what no memory can hold.
    """
    start = cursor.at
    n_stream = cursor.u32("KV section: number of streams")
    if not 1 <= n_stream <= MAX_SEQ:
        raise mismatch("KV section: number of streams", f"1 to {MAX_SEQ}", n_stream, start)
    cursor.need(4 * n_stream, f"KV section: {n_stream} streams")
    streams = tuple(_read_stream(cursor, shape, dialect, s, whole=whole) for s in range(n_stream))
    if not whole:
        _check_one_sequence(streams)
    return KVSection(streams, Span(start, cursor.at - start))


def _read_stream(cursor: Cursor, shape: KVShape, dialect: Dialect, s: int, *, whole: bool) -> StreamRecords:
    what = f"KV section: stream {s}"
    cells = read_cells(cursor, None if whole else 1, has_ext=shape.has_ext, what=what, n_max=shape.n_cells)
    if not cells.n:
        return StreamRecords(cells)
    head = read_stream_head(cursor, shape, dialect, what)
    k = tuple(read_rows(cursor, cells.n, f"{what}: K of layer {i}") for i in range(head.n_k))
    read_v = read_channels if head.v_trans else read_rows
    v = tuple(read_v(cursor, cells.n, f"{what}: V of layer {i}") for i in range(head.n_v))
    return StreamRecords(cells, k, v, head.v_trans, head.rot)


class StreamHead(NamedTuple):
    """What stands between the cells of a stream and its tensors; see `StreamRecords`."""

    v_trans: bool
    n_k: int
    n_v: int
    rot: tuple[int, int] | None


def read_stream_head(cursor: Cursor, shape: KVShape, dialect: Dialect, what: str) -> StreamHead:
    """Read what is said of all tensors of a stream that has cells."""
    v_trans = cursor.u32(f"{what}: V layout")
    if v_trans > 1:
        raise mismatch(f"{what}: V layout", "0 or 1", v_trans, cursor.at - 4)
    n_layer = _read_n_layer(cursor, what)
    if shape.n_k is not None and n_layer != shape.n_k:
        raise mismatch(f"{what}: number of layers", shape.n_k, n_layer, cursor.at - 4)
    rot = _read_rotation(cursor, what) if dialect.says_rotation else None
    n_v = n_layer if shape.n_v is None else shape.n_v
    cursor.need(HEAD_NBYTES * (n_layer + n_v), f"{what}: {n_layer} tensors of K and {n_v} of V")
    return StreamHead(bool(v_trans), n_layer, n_v, rot)


def _read_n_layer(cursor: Cursor, what: str) -> int:
    n_layer = cursor.u32(f"{what}: number of layers")
    if n_layer > MAX_LAYERS:
        raise mismatch(f"{what}: number of layers", f"at most {MAX_LAYERS}", n_layer, cursor.at - 4)
    return n_layer


def _read_rotation(cursor: Cursor, what: str) -> tuple[int, int]:
    rot = cursor.u32(f"{what}: rotation of K"), cursor.u32(f"{what}: rotation of V")
    for name, width, back in (("K", rot[0], 8), ("V", rot[1], 4)):
        if width & (width - 1):
            raise mismatch(f"{what}: rotation of {name}", "0 or a power of two", width, cursor.at - back)
    return rot


def read_rows(cursor: Cursor, n_cells: int, what: str, *, least: int = 1) -> RowsRecord:
    """Read the head of a tensor whose rows lie cell by cell, of at least so many bytes each, and go over them."""
    dtype = _read_dtype(cursor, what)
    row_bytes = cursor.u64(f"{what}: bytes of a row")
    if not least <= row_bytes <= MAX_ROW or ELEMENTS[dtype].width(row_bytes) is None:
        expected = f"{least} to {MAX_ROW}, in blocks of {ELEMENTS[dtype].nbytes}"
        raise mismatch(f"{what}: bytes of a row of {ELEMENTS[dtype].name}", expected, row_bytes, cursor.at - 8)
    nbytes = n_cells * row_bytes
    return RowsRecord(dtype, row_bytes, Span(cursor.skip(nbytes, f"{what}: {n_cells} rows of {row_bytes}"), nbytes))


def read_channels(cursor: Cursor, n_cells: int, what: str) -> RowsRecord:
    """Read the head of a tensor that lies channel by channel, and go over its elements."""
    dtype = _read_dtype(cursor, what)
    element = ELEMENTS[dtype]
    if element.n_block != 1:
        raise mismatch(f"{what}: type of V by channel", "one without blocks", element.name, cursor.at - 4)
    elem_bytes = cursor.u32(f"{what}: bytes of an element")
    if elem_bytes != element.nbytes:
        raise mismatch(f"{what}: bytes of an element of {element.name}", element.nbytes, elem_bytes, cursor.at - 4)
    width = cursor.u32(f"{what}: number of channels")
    if not width:
        raise mismatch(f"{what}: number of channels", "1 or more", width, cursor.at - 4)
    nbytes = n_cells * width * elem_bytes
    start = cursor.skip(nbytes, f"{what}: {width} channels of {n_cells} elements")
    return RowsRecord(dtype, width * elem_bytes, Span(start, nbytes), True, elem_bytes)


def _read_dtype(cursor: Cursor, what: str) -> int:
    dtype = cursor.i32(f"{what}: type")
    if dtype not in ELEMENTS:
        known = ", ".join(f"{number} ({element.name})" for number, element in ELEMENTS.items())
        raise mismatch(f"{what}: type", f"one of {known}", dtype, cursor.at - 4)
    return dtype


def _check_one_sequence(streams: tuple[StreamRecords, ...]) -> None:
    """Refuse cells in two streams, or of two sequences, in what one sequence left."""
    filled = [(s, stream.cells) for s, stream in enumerate(streams) if stream.cells.n]
    for s, cells in filled[1:]:
        raise mismatch(f"KV section: cells of stream {s}", "0, since another one has some", cells.n, cells.start - 4)
    for s, cells in filled:
        other = cells.ids != cells.ids[0]
        if other.any():
            raise bad_id(cells, int(other.argmax()), f"{cells.ids[0]} as in cell 0", f"KV section: stream {s}")


def read_states(cursor: Cursor, shape: StatesShape, *, whole: bool) -> StatesSection:
    """Read what one recurrent memory wrote; see `read_kv`."""
    start = cursor.at
    cells, n_layer = read_states_head(cursor, shape.n_cells, whole=whole)
    cursor.need(HEAD_NBYTES * (shape.n_r + shape.n_s), f"states section: {shape.n_r + shape.n_s} tensors")
    r = tuple(read_state_rows(cursor, cells.n, f"R {i}") for i in range(shape.n_r))
    s = tuple(read_state_rows(cursor, cells.n, f"S {i}") for i in range(shape.n_s))
    return StatesSection(cells, n_layer, r, s, Span(start, cursor.at - start))


def read_states_head(cursor: Cursor, n_cells: int = MAX_CELLS, *, whole: bool) -> tuple[CellRecords, int]:
    """Read the cells of a states section, and how many layers its model has."""
    what = "states section"
    cells = read_cells(cursor, None if whole else 0, has_ext=False, what=what, n_max=n_cells)
    if not whole and cells.n > 1:
        raise mismatch(f"{what}: number of cells", "1 or 0, for one sequence", cells.n, cells.start - 4)
    if whole:
        _check_states_ids(cells, what)
    s_trans = cursor.u32(f"{what}: layout of S")
    if s_trans:
        raise mismatch(f"{what}: layout of S", "0, row by row", s_trans, cursor.at - 4)
    return cells, _read_n_layer(cursor, what)


def _check_states_ids(cells: CellRecords, what: str) -> None:
    """Refuse a state of nobody, and two states of one sequence."""
    if (cells.n_ids == 0).any():
        i = int((cells.n_ids == 0).argmax())
        raise mismatch(f"{what}: number of ids of cell {i}", "1 or more", 0, cells.byte_of(i) + 4)
    _, first = np.unique(cells.ids, return_index=True)
    if len(first) < len(cells.ids):
        again = np.setdiff1d(np.arange(len(cells.ids)), first)
        raise bad_id(cells, int(again[0]), "one that has no state yet", what)


def read_state_rows(cursor: Cursor, n_cells: int, name: str) -> RowsRecord:
    """Read one tensor of a states section: rows of no bytes are right where a model keeps no S."""
    return read_rows(cursor, n_cells, f"states section: {name}", least=0)
