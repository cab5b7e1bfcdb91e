"""Parses the state of a memory that is known: everything is verified before anyone changes anything.

Source: spec state_format.md sections 2 to 4 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pykv.errors import StateError
from pykv.state_format.cursor import Cursor, mismatch
from pykv.state_format.dialect import NEWEST_FIRST, Dialect
from pykv.state_format.hold import hold_kv, hold_states
from pykv.state_format.layout import KVLayout, SectionLayout, StatesLayout
from pykv.state_format.read_cells import MAX_CELLS
from pykv.state_format.records import KVSection, Section, StatesSection
from pykv.state_format.structure import KVShape, SectionShape, StatesShape, read_kv, read_states

if TYPE_CHECKING:
    from typing_extensions import Buffer


def parse_state(
    data: Buffer,
    start: int,
    layouts: Sequence[SectionLayout],
    *,
    whole: bool,
    dialect: Dialect | None = None,
    stop: int | None = None,
    strict: bool = True,
    exact: bool = True,
) -> tuple[tuple[Section, ...], int]:
    """Read one section for each part of a memory, and hold each against what that part expects.

    The payload is not copied, and nothing of `data` is kept.

    Parameters
    ----------
    data : bytes, a memoryview, a mapped file.
    start, stop : the bytes where the state lies; None = to the end.
    layouts : what the parts of the memory expect, in their order.
    whole : the state of all sequences, not of one.
    dialect : None = the newest in which the bytes make sense, where nothing says which one it is.
    strict : if False, differences that can be converted are no errors; see `hold_kv`.
    exact : whether the state must end at `stop`.

    Returns
    -------
    The sections, and the byte behind the last.

    Raises
    ------
    StateError : says what was expected, what was found and at which byte.
    """
    shapes = [shape_of(layout, strict=strict) for layout in layouts]
    with Cursor(data, start, stop) as cursor:
        if dialect is None:
            found: Iterable[Section] = _read_in_what_fits(cursor, shapes, whole=whole, exact=exact)
        else:
            found = (read_section(cursor, shape, dialect, whole=whole) for shape in shapes)
        sections = []
        for layout, section in zip(layouts, found, strict=True):
            hold(section, layout, whole=whole, strict=strict)
            sections.append(section)
        _check_end(cursor, exact=exact)
        return tuple(sections), cursor.at


def shape_of(layout: SectionLayout, *, strict: bool = True) -> SectionShape:
    """Return what a layout says about a section that its bytes do not."""
    n_cells = layout.n_cells if strict else MAX_CELLS  # one stream may hold what goes into several
    if isinstance(layout, KVLayout):
        return KVShape(layout.has_ext, len(layout.k), len(layout.v), n_cells)
    return StatesShape(len(layout.r), len(layout.s), n_cells)


def read_section(cursor: Cursor, shape: SectionShape, dialect: Dialect, *, whole: bool) -> Section:
    """Read one section as it describes itself."""
    if isinstance(shape, KVShape):
        return read_kv(cursor, shape, dialect, whole=whole)
    return read_states(cursor, shape, whole=whole)


def hold(section: Section, layout: SectionLayout, *, whole: bool, strict: bool = True) -> None:
    """Refuse a section that the part of a memory cannot take over; see `hold_kv`."""
    if isinstance(section, KVSection) and isinstance(layout, KVLayout):
        hold_kv(section, layout, whole=whole, strict=strict)
    elif isinstance(section, StatesSection) and isinstance(layout, StatesLayout):
        hold_states(section, layout, whole=whole, strict=strict)
    else:
        raise mismatch("section", type(layout).__name__, type(section).__name__, section.span.start)


def _read_in_what_fits(cursor: Cursor, shapes: Sequence[SectionShape], *, whole: bool, exact: bool) -> list[Section]:
    """Return the sections in the newest dialect in which the bytes are sections of these shapes.

    Where there is none, the error of the one that got furthest is raised.
    """
    start, errors = cursor.at, []
    for dialect in NEWEST_FIRST:
        cursor.at = start
        try:
            sections = [read_section(cursor, shape, dialect, whole=whole) for shape in shapes]
            _check_end(cursor, exact=exact)
            return sections
        except StateError as error:
            errors.append(error)
    raise max(errors, key=lambda error: error.offset or 0)


def _check_end(cursor: Cursor, *, exact: bool) -> None:
    if exact and cursor.left:
        raise mismatch("state", "its end", f"{cursor.left} more bytes", cursor.at)
