"""Reading what a saved state holds without a model: its sections, by name, and rows of it as bytes or numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from pykv.errors import ParamError, StateError
from pykv.ggml.types import BY_NUMBER
from pykv.memory.state_channels import WORDS
from pykv.memory.state_convert import Form
from pykv.runtime.states.noted import refuse_notes
from pykv.runtime.states.saved_file import SavedFile, named, open_state
from pykv.state_format import (
    ELEMENTS,
    CellRecords,
    Dialect,
    KVSection,
    RowsRecord,
    Section,
    StreamRecords,
    type_name,
)
from pykv.typing import AnyArray, F32Array, I64Array, as_int

Rotation = tuple[int, int]
"""Widths by which K and V are rotated, 0 = not."""

MAX_ROTATION = 2**31
"""More elements than a row has."""

SAY_ROTATION = (
    "pass rotation=K,V, two numbers: 0,0 unless the model's heads are a multiple of 64 wide, else for K the largest "
    "power of two that divides a head, and 64 for V"
)


@dataclass(frozen=True, eq=False)
class ReadState:
    """A saved state, parsed without knowing of which memory it is.

    Attributes
    ----------
    dialect : as the head says, or the newest in which the bytes make sense.
    """

    saved: SavedFile
    dialect: Dialect
    sections: tuple[Section, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is the state of all sequences."""
        return self.saved.container.kind.whole

    @property
    def data(self) -> AnyArray:
        """(n,) uint8, all bytes of the file, not copied."""
        array: AnyArray = np.frombuffer(memoryview(self.saved.data), np.uint8)
        return array

    @property
    def names(self) -> tuple[str, ...]:
        """What each section is called."""
        return section_names(self.sections)

    def sequences(self) -> list[int]:
        """Return the sequences that have cells; of one sequence's state, the number that it had."""
        found = {int(i) for section in self.sections for cells in cells_of(section) for i in np.unique(cells.ids)}
        own = self.saved.container.seq_id
        return sorted(found) if found or own is None else [own]


@contextmanager
def read_state(path: str | os.PathLike[str]) -> Iterator[ReadState]:
    """Open a saved state and find its sections.

    Raises
    ------
    OSError : it cannot be read.
    StateError : it is no saved state, or is damaged.
    """
    with ExitStack() as stack:
        try:
            saved = stack.enter_context(open_state(path))
            dialect, sections = saved.parsed()
        except StateError as error:
            refuse_notes(path)
            raise named(error, path) from None
        yield ReadState(saved, dialect, sections)


def section_names(sections: Sequence[Section]) -> tuple[str, ...]:
    """Return a name for each section: "KV" is the first cache, then "window", or "index" if it stores no V."""
    names: list[str] = []
    for section in sections:
        if not isinstance(section, KVSection):
            names.append("states")
        elif "KV" not in names:
            names.append("KV")
        else:
            has_v = any(stream.v for stream in section.streams)
            names.append("window" if has_v or not filled(section) else "index")
    return tuple(names)


def cells_of(section: Section) -> list[CellRecords]:
    """Return the cells of each stream; a states section has one."""
    return [stream.cells for stream in section.streams] if isinstance(section, KVSection) else [section.cells]


def filled(section: KVSection) -> list[StreamRecords]:
    """Return the streams that have cells."""
    return [stream for stream in section.streams if stream.cells.n]


def width_of(rows: RowsRecord) -> int:
    """Return the elements of a row."""
    width = ELEMENTS[rows.dtype].width(rows.row_bytes)
    assert width is not None, "the parser refuses rows that are no whole blocks"
    return width


def form_of(
    rows: RowsRecord, stream: StreamRecords, is_v: bool, given: Rotation | None, name: str = "the state"
) -> Form:
    """Return what the bytes of a stream's rows mean.

    Parameters
    ----------
    given : by which widths quantised rows are rotated where the state does not say so.
    name : of the state, for messages.

    Raises
    ------
    ParamError : neither the state nor the caller says it, or rows are no whole number of such widths.
    """
    dtype = BY_NUMBER[rows.dtype]
    if stream.rot is not None:
        return Form(dtype, checked_rotation(stream.rot[is_v], rows))
    if not dtype.is_quantized:
        return Form(dtype)
    if given is None:
        raise ParamError(f"{name} does not say by which widths its {dtype.label} rows are rotated: {SAY_ROTATION}")
    return Form(dtype, checked_rotation(given[is_v], rows))


def checked_widths(rotation: Rotation | None) -> Rotation | None:
    """Return two widths if rows could be rotated by them; raises `ParamError` where not."""
    if rotation is None:
        return None
    widths = tuple(map(as_int, rotation))
    if len(widths) != 2 or any(one is None or not 0 <= one <= MAX_ROTATION or one & (one - 1) for one in widths):
        raise ParamError(f"rotation={','.join(map(str, rotation))}: must be two numbers, each 0 or a power of two")
    k, v = widths
    assert k is not None
    assert v is not None
    return k, v


def checked_rotation(rot: int, rows: RowsRecord) -> int:
    """Return a width if it is one by which such rows can be rotated."""
    width = width_of(rows)
    if rot < 0 or rot & (rot - 1) or (rot and width % rot):
        kind = type_name(rows.dtype)
        raise ParamError(
            f"rotation={rot}: must be 0 or a power of two that divides the {width} elements of a {kind} row"
        )
    return rot


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The rows of one tensor in a source.

    Attributes
    ----------
    n : how many.
    data : (n bytes,) uint8, the source that the record's span counts.
    """

    record: RowsRecord
    n: int
    form: Form
    data: AnyArray

    @property
    def width(self) -> int:
        """Elements of a row."""
        return width_of(self.record)

    @property
    def payload(self) -> AnyArray:
        """(bytes,) uint8 of all rows as they lie."""
        start, nbytes = self.record.span
        return self.data[start : start + nbytes]

    def raw(self, which: slice | I64Array, elements: slice | None = None) -> AnyArray:
        """Return some elements, whole blocks, of some rows as they are stored: (k, bytes)."""
        dtype = self.form.dtype
        part = slice(0, self.width) if elements is None else elements
        if self.record.by_channel:
            words = self.payload.view(WORDS[self.record.elem_bytes]).reshape(self.width, self.n)
            return np.ascontiguousarray(words[part][:, which].T).view(np.uint8)
        table = self.payload.reshape(self.n, self.record.row_bytes)
        return table[:, dtype.row_size(part.start) : dtype.row_size(part.stop)][which]

    def values(self, which: slice | I64Array) -> F32Array:
        """Return rows as numbers, the rotation undone: (k, width)."""
        return self.form.values(self.raw(which))
