"""Notes beside a session: which of those in the file are about the session that is there.

They are put in place before the session that they are about, with those on the session before it inside. So whenever a
save ends, by a crash too, the file holds notes on whichever session is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from pykv.errors import ParamError, StateError
from pykv.state_format import (
    Kind,
    Notes,
    SectionSum,
    Trailer,
    mapped,
    read_container,
    read_side_car,
    session_of,
    side_car,
    trailer_pieces,
    verify_sections,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

PREVIOUS = "previous"
"""The attachment of a side-car with the one before it; no caller's may be called so."""

_UNCHECKED = "or, if another program wrote it there, remove the notes and load it without a check"

Source = tuple[Trailer, memoryview]
"""Notes, and the bytes in which their attachments lie."""


def notes_beside(path: str, data: Buffer, stack: ExitStack) -> Source:
    """Return those notes beside a session that are about its bytes; their file is open as long as the stack is.

    The rows of the session are not held against their checksums, but where nothing else tells which notes are meant.

    Raises
    ------
    StateError : there are none.
    """
    beside = side_car(path)
    try:
        sources = _sources(stack.enter_context(mapped(beside, "notes on a session")))
    except StateError as error:
        why = str(error).removeprefix(f"{beside}: ")
        raise StateError(
            f"{beside}: the notes on the session beside them are damaged: {why}; take another copy of both, or remove "
            "the notes and load the session without a check"
        ) from None
    found = _about(sources, data)
    if found is None:
        raise StateError(f"{beside}: {_misfit(sources, data)}")
    return found


def notes_nearest(data: Buffer, beside: Buffer) -> Source:
    """Return those notes, of the ones in a side-car, that fit a session best, however damaged that is.

    Raises
    ------
    StateError : the side-car is none, or damaged.
    """
    sources = _sources(beside)
    return _about(sources, data) or max(sources, key=lambda one: _share_right(one[0].notes, data))


def attachments_of(trailer: Trailer, data: Buffer) -> dict[str, memoryview]:
    """Return what the caller of a save attached, by name: views of the bytes in which the notes lie."""
    view = memoryview(data).cast("B").toreadonly()
    return {name: view[at : at + n] for name, (at, n) in trailer.attachments.items() if name != PREVIOUS}


def side_car_pieces(notes: Notes, attachments: Mapping[str, Buffer], session: str | os.PathLike[str]) -> list[Buffer]:
    """Return the bytes of notes on a session that is to replace one, with the notes on that one in them, not copied."""
    before = _pieces_before(session)
    return trailer_pieces(notes, {**attachments, **({PREVIOUS: before} if before else {})})


def _pieces_before(path: str | os.PathLike[str]) -> list[Buffer]:
    """Return the notes on the session at a path, without those that they hold in turn; nothing where there are none.

    They are views of the file, which is replaced later on, never overwritten.
    """
    with suppress(OSError, StateError), ExitStack() as stack:
        data, notes = (stack.enter_context(mapped(each)) for each in (path, side_car(path)))
        found = _about(_sources(notes), data)
        if found is not None:
            return trailer_pieces(found[0].notes, {**attachments_of(*found)})
    return []


def is_side_car(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is one that holds notes, on whatever session."""
    with suppress(OSError, StateError), mapped(path) as data:
        read_side_car(data)
        return True
    return False


def refuse_target(path: str, *, has_side_car: bool) -> None:
    """Raise `ParamError` where a save would put a state in the place of notes, or notes in that of a state.

    Parameters
    ----------
    has_side_car : whether notes are written beside it.
    """
    target = os.path.realpath(path)
    session = session_of(target)
    if session is not None and (_kind(session) is Kind.SESSION_FILE or is_side_car(target)):
        raise ParamError(f"path={path!r}: has the name of the notes on the session {session}; take another name")
    beside = side_car(path)
    found = _kind(beside) if has_side_car else None
    if found in (Kind.SESSION_FILE, Kind.SEQUENCE_FILE):
        raise ParamError(
            f"path={path!r}: notes on it would replace {beside}, which is a {found.value}; take another name"
        )


def _kind(path: str | os.PathLike[str]) -> Kind | None:
    """Return what kind of state a file holds; None where there is none that can be read."""
    with suppress(OSError, StateError), mapped(path) as data:
        return read_container(data).kind
    return None


def _sources(data: Buffer) -> list[Source]:
    """Return the notes in a side-car, and those that they hold."""
    view = memoryview(data).cast("B").toreadonly()
    newest = read_side_car(view)
    inside = newest.attachments.get(PREVIOUS)
    if inside is None:
        return [(newest, view)]
    older = view[inside.start : inside.start + inside.nbytes]
    return [(newest, view), (read_side_car(older), older)]


def _about(sources: Sequence[Source], data: Buffer) -> Source | None:
    """Return the notes that are about a session, by its head; where heads are alike by its length, then by all of it.

    So a session whose rows are damaged has its notes, which tell.
    """
    known = [one for one in sources if _fits(one[0].notes.sections[:1], data)]
    same = [one for one in known if _nbytes(one[0].notes) == memoryview(data).nbytes]
    if len(same) > 1:
        same = [one for one in same if _fits(one[0].notes.sections, data)] or same
    return next(iter(same or known), None)


def _fits(sections: tuple[SectionSum, ...], data: Buffer) -> bool:
    try:
        verify_sections(data, Notes(sections=sections))
    except StateError:
        return False
    return bool(sections)


def _share_right(notes: Notes, data: Buffer) -> float:
    return sum(_fits((section,), data) for section in notes.sections) / max(len(notes.sections), 1)


def _nbytes(notes: Notes) -> int:
    return sum(section.nbytes for section in notes.sections)


def _misfit(sources: Sequence[Source], data: Buffer) -> str:
    """Say what is wrong where no notes are about a session."""
    rows = [section for trailer, _ in sources for section in trailer.notes.sections[1:]]
    if any(_fits((section,), data) for section in rows):
        return "the head of the session beside these notes is damaged; take another copy of it"
    return (
        f"notes on another session than the one beside it: on {_nbytes(sources[0][0].notes)} bytes, and it has "
        f"{memoryview(data).nbytes}; take another copy of both, {_UNCHECKED}"
    )
