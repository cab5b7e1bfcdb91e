"""States written field by field, as the tables of the format say, and where their length fields are. Plain Python."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from typing import NamedTuple


class Cell(NamedTuple):
    pos: int
    ids: tuple[int, ...]
    ext: tuple[int, int, int] | None = None


class Rows(NamedTuple):
    """One tensor: the element's type, bytes and elements of a row; by channel, the bytes of an element."""

    dtype: int
    row_bytes: int
    elem_bytes: int = 0


@dataclass
class StateBytes:
    """Bytes that grow field by field.

    Attributes
    ----------
    lengths : byte and number of bytes of each field on which the length of something depends.
    payloads : byte and number of bytes of each tensor's rows.
    """

    data: bytearray = field(default_factory=bytearray)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    payloads: list[tuple[int, int]] = field(default_factory=list)
    seed: int = 0

    def u32(self, value: int) -> None:
        self.data += struct.pack("<I", value)

    def i32(self, value: int) -> None:
        self.data += struct.pack("<i", value)

    def length(self, value: int, form: str = "<I") -> None:
        self.lengths.append((len(self.data), struct.calcsize(form)))
        self.data += struct.pack(form, value)

    def payload(self, nbytes: int) -> None:
        self.payloads.append((len(self.data), nbytes))
        self.data += random.Random(self.seed + len(self.data)).randbytes(nbytes)

    def file_head(self, magic: bytes, version: int, tokens: list[int]) -> StateBytes:
        self.data += magic
        self.u32(version)
        self.length(len(tokens))
        for token in tokens:
            self.i32(token)
        return self

    def arch(self, name: str) -> StateBytes:
        self.length(len(name))
        self.data += name.encode()
        return self

    def cells(self, cells: list[Cell]) -> None:
        self.length(len(cells))
        for cell in cells:
            self.i32(cell.pos)
            self.length(len(cell.ids))
            for each in (*(cell.ext or ()), *cell.ids):
                self.i32(each)

    def kv(
        self,
        streams: list[list[Cell]],
        k: list[Rows],
        v: list[Rows],
        *,
        v_trans: bool = False,
        rot: tuple[int, int] | None = (0, 0),
    ) -> StateBytes:
        """Add a KV section; `rot` None = in the older dialect."""
        self.length(len(streams))
        for cells in streams:
            if not cells:
                self.length(0)
                continue
            self.cells(cells)
            self.u32(int(v_trans))
            self.length(len(k))
            for width in rot or ():
                self.u32(width)
            for rows in k:
                self.rows(rows, len(cells))
            for rows in v:
                if v_trans:
                    self.i32(rows.dtype)
                    self.length(rows.elem_bytes)
                    self.length(rows.row_bytes // rows.elem_bytes)
                    self.payload(len(cells) * rows.row_bytes)
                else:
                    self.rows(rows, len(cells))
        return self

    def rows(self, rows: Rows, n_cells: int) -> None:
        self.i32(rows.dtype)
        self.length(rows.row_bytes, "<Q")
        self.payload(n_cells * rows.row_bytes)

    def states(self, cells: list[Cell], n_layer: int, r: list[Rows], s: list[Rows]) -> StateBytes:
        """Add a states section."""
        self.cells(cells)
        self.u32(0)
        self.u32(n_layer)
        for rows in (*r, *s):
            self.rows(rows, len(cells))
        return self


F16 = Rows(1, 16, 2)
Q8 = Rows(8, 68)
F32 = Rows(0, 24, 4)
EMPTY = Rows(0, 0)
SEQ2 = [Cell(p, (2,)) for p in (5, 6, 7)]
SHARED = [Cell(0, (0, 1, 2)), Cell(1, (0,)), Cell(9, ()), Cell(4, (1, 3)), Cell(2, (2,))]
EXT = [Cell(0, (0,), (3, 4, 77)), Cell(0, (0, 1), (-1, 2**31 - 1, -1)), Cell(2**31 - 1, (3,), (0, 0, 0))]
STREAM1 = [Cell(3, (1,)), Cell(4, (1,))]
NO_ID = [Cell(8, ())]
OWNED = [Cell(3, (0, 2)), Cell(5, (1,))]


@dataclass(frozen=True)
class Sample:
    """A state, and what a memory that can take it over expects: sections of (kind, settings)."""

    name: str
    whole: bool
    state: StateBytes
    layouts: tuple[object, ...]
    start: int = 0


def kv_layout(k: list[Rows], v: list[Rows], n_stream: int = 1, **settings: object) -> object:
    """Return what a cache of eight cells and four sequences with these tensors expects."""
    from pykv.state_format import KVLayout

    rows = (layout_rows(k), layout_rows(v))
    return KVLayout(n_stream, 8, 4, *rows, **{"v_trans": False, **settings})  # type: ignore[arg-type]


def states_layout(n_layer: int, r: list[Rows], s: list[Rows]) -> object:
    """Return what a recurrent memory of four cells expects."""
    from pykv.state_format import StatesLayout

    return StatesLayout(4, 4, n_layer, layout_rows(r), layout_rows(s))


def layout_rows(rows: list[Rows]) -> tuple:
    from pykv.state_format import RowsLayout

    return tuple(RowsLayout(*each) for each in rows)


def samples() -> list[Sample]:
    """Return one small state of each shape, in the newest dialect."""
    hybrid = StateBytes().kv([SEQ2], [F16], [F16]).states(NO_ID, 3, [F32, F32], [F32, F32])
    window = StateBytes().kv([SHARED], [F16, F16], [F16, F16]).kv([SHARED[2:]], [Q8], [Q8], rot=(64, 64))
    return [
        Sample("sequence", False, StateBytes().kv([SEQ2], [F16, Q8], [F16, Q8]), (kv_layout([F16, Q8], [F16, Q8]),)),
        Sample("shared", True, StateBytes().kv([SHARED], [F16, F16], [F16, F16]), (kv_layout([F16] * 2, [F16] * 2),)),
        Sample("ext", True, StateBytes().kv([EXT], [F16], [F16]), (kv_layout([F16], [F16], has_ext=True),)),
        Sample(
            "by channel",
            False,
            StateBytes().kv([SEQ2], [F16], [F16], v_trans=True),
            (kv_layout([F16], [F16], v_trans=True),),
        ),
        Sample(
            "streams",
            True,
            StateBytes().kv([[], STREAM1, [], []], [Q8], [Q8], rot=(64, 64)),
            (kv_layout([Q8], [Q8], 4, rot=(64, 64)),),
        ),
        Sample("K alone", False, StateBytes().kv([SEQ2], [F16, F16], []), (kv_layout([F16, F16], []),)),
        Sample(
            "window",
            True,
            window,
            (kv_layout([F16] * 2, [F16] * 2), kv_layout([Q8], [Q8], rot=(64, 64))),
        ),
        Sample(
            "states",
            True,
            StateBytes().states(OWNED, 2, [F32] * 2, [F32] * 2),
            (states_layout(2, [F32] * 2, [F32] * 2),),
        ),
        Sample("no S", True, StateBytes().states(OWNED, 5, [F32], [EMPTY]), (states_layout(5, [F32], [EMPTY]),)),
        Sample("hybrid", False, hybrid, (kv_layout([F16], [F16]), states_layout(3, [F32] * 2, [F32] * 2))),
    ]
