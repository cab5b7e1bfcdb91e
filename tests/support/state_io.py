"""States of a memory as bytes and back, through the parser, as one call each."""

from __future__ import annotations

from typing import Any

from pykv.memory.state_part import Converted
from pykv.state_format import NEWEST, Dialect, KVSection, RowsRecord, Section
from pykv.state_format.parse import parse_state


def saved(memory: Any, seq_id: int = -1, *, partial: bool = False, dialect: Dialect = NEWEST) -> bytes:
    """Return a sequence, or all, as bytes."""
    image, out = memory.state_image(seq_id, partial, dialect), bytearray()
    image.write_to(out.extend)
    assert len(out) == image.nbytes
    return bytes(out)


def parsed(
    memory: Any, data: bytes, *, whole: bool, partial: bool = False, dialect: Dialect = NEWEST, strict: bool = True
) -> tuple[Section, ...]:
    """Return what bytes say, held against a memory."""
    layouts = memory.state_layouts(partial)
    return parse_state(data, 0, layouts, whole=whole, dialect=dialect, strict=strict)[0]


def load(
    memory: Any,
    data: bytes,
    seq_id: int = -1,
    *,
    partial: bool = False,
    dialect: Dialect = NEWEST,
    convert: bool = False,
) -> Converted:
    """Parse and load."""
    whole = seq_id == -1
    sections = parsed(memory, data, whole=whole, partial=partial, dialect=dialect, strict=not convert)
    return memory.load_state(seq_id, sections, data, partial, convert)


def rows_of(section: Section) -> list[RowsRecord]:
    """Return all rows of a section, in the order of the bytes."""
    if isinstance(section, KVSection):
        return [one for stream in section.streams for one in (*stream.k, *stream.v)]
    return [*section.r, *section.s]


def without_rows(data: bytes, sections: tuple[Section, ...]) -> bytes:
    """Return the bytes of a state with zeros for all rows."""
    out = bytearray(data)
    for section in sections:
        for rows in rows_of(section):
            out[rows.span.start : rows.span.start + rows.span.nbytes] = bytes(rows.span.nbytes)
    return bytes(out)
