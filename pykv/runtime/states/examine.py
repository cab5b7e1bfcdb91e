"""A saved state that may be damaged, opened all the same: what can be read of it, and what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pykv.errors import StateError
from pykv.runtime.states.noted import refuse_notes
from pykv.runtime.states.read_state import ReadState, section_names
from pykv.runtime.states.saved_file import SavedFile, named
from pykv.runtime.states.side_notes import attachments_of, notes_nearest
from pykv.state_format import (
    NEWEST,
    Container,
    Notes,
    Section,
    SectionSum,
    Trailer,
    checksum,
    mapped,
    read_container,
    read_trailer,
    side_car,
)
from pykv.state_format.salvage import salvage_container, salvage_sections

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Fault(NamedTuple):
    """Something that is wrong, and the byte where; None where there is no such place."""

    what: str
    offset: int | None = None


@dataclass(frozen=True, eq=False)
class Examined:
    """A saved state, perhaps damaged.

    Attributes
    ----------
    state : its sections, as far as they could be read.
    is_cut : whether there should be more.
    wrong : the parts whose checksum is another than the noted one.
    faults : all that is wrong, the worst first.
    """

    state: ReadState
    is_cut: bool
    wrong: tuple[str, ...]
    faults: tuple[Fault, ...]


@contextmanager
def examined(path: str | os.PathLike[str]) -> Iterator[Examined]:
    """Open a saved state; damage is told, not raised, as long as it can be told what the file is.

    Raises
    ------
    OSError : it cannot be read.
    StateError : it is no saved state, or can be read in several ways; the message begins with the path.
    """
    with mapped(path) as data:
        try:
            found = _examined(path, data)
        except StateError as error:
            refuse_notes(path)
            raise named(error, path) from None
        yield found


def _examined(path: str | os.PathLike[str], data: Buffer) -> Examined:
    faults: list[Fault] = []
    trailer = _own_trailer(data, faults)
    stop = None if trailer is None else trailer.span.start
    container, is_cut = _container(data, stop, faults)
    dialect = container.dialect or NEWEST
    sections: tuple[Section, ...] = ()
    if not is_cut:
        try:
            dialect, sections = SavedFile(container, data).parsed()
        except StateError as error:
            if error.offset is None:
                raise
            is_cut = True
            start, nbytes = container.state
            found = salvage_sections(
                data, start, whole=container.kind.whole, dialect=container.dialect, stop=start + nbytes
            )
            dialect, sections = found.dialect, found.sections
            faults.append(Fault(_cut(found.fault, found.missing, sections), found.fault.offset))
    notes, attachments = _notes(path, data, container, trailer, faults)
    state = ReadState(SavedFile(container, data, notes, attachments), dialect, sections)
    wrong = [] if notes is None else list(_wrong(data, notes, state))
    faults += [fault for _, fault in wrong]
    return Examined(state, is_cut, tuple(name for name, _ in wrong), tuple(faults))


def _own_trailer(data: Buffer, faults: list[Fault]) -> Trailer | None:
    """Return the notes behind a sequence."""
    try:
        return read_trailer(data)
    except StateError as error:
        faults.append(Fault(f"the notes behind the state are damaged: {error}", error.offset))
        return None


def _container(data: Buffer, stop: int | None, faults: list[Fault]) -> tuple[Container, bool]:
    """Return the head, or what is left of it, and whether that is not all."""
    try:
        return read_container(data, stop), False
    except StateError as error:
        container = salvage_container(data, error)
        faults.append(Fault(f"the head is damaged or cut off: {error}", error.offset))
        return container, True


def _cut(fault: StateError, missing: str, sections: tuple[Section, ...]) -> str:
    """Return what ends a state early, and what is missing of it."""
    name = section_names(sections)[-1] if sections else "the first section"
    told = f"missing of {name}: {missing}" if missing else f"what follows {name} is no section"
    return f"{told if sections else 'no section can be read'}; {fault}"


def _notes(
    path: str | os.PathLike[str], data: Buffer, container: Container, trailer: Trailer | None, faults: list[Fault]
) -> tuple[Notes | None, Mapping[str, memoryview]]:
    """Return the notes on a state and what is attached to them, which stand behind it or beside it."""
    if trailer is not None:
        return trailer.notes, attachments_of(trailer, data)
    beside = side_car(path)
    if not container.kind.whole or not beside.is_file():
        return None, {}
    try:
        with mapped(beside, "notes on a session") as source:
            nearest, view = notes_nearest(data, source)
            return nearest.notes, attachments_of(nearest, view)
    except OSError as error:
        faults.append(Fault(f"{beside}: the notes cannot be read: {error.strerror or error}"))
    except StateError as error:
        why = str(error).removeprefix(f"{beside}: ")
        faults.append(Fault(f"{beside}: damaged notes: {why}; the session is read without them if they are removed"))
    return None, {}


def _wrong(data: Buffer, notes: Notes, state: ReadState) -> Iterator[tuple[str, Fault]]:
    """Yield the parts of a state that are not what was noted of them."""
    for i, one in enumerate(notes.sections):
        fault = _sum_fault(data, one)
        if fault is not None:
            name = _part(i, one, state)
            yield name, Fault(f"{name} does not match its checksum: {fault}", one.start)


def _sum_fault(data: Buffer, noted: SectionSum) -> str | None:
    """Return in what way some bytes are not those that were summed; None where they are."""
    with memoryview(data).cast("B") as view:
        stop = noted.start + noted.nbytes
        if stop > len(view):
            return f"bytes {noted.start} to {stop - 1} were saved, {stop - len(view)} of them are missing at the end"
        with view[noted.start : stop] as summed:
            found = checksum(summed)
    where = f"in bytes {noted.start} to {stop - 1}"
    return None if found == noted.checksum else f"{where}, expected {noted.checksum}, found {found}"


def _part(i: int, noted: SectionSum, state: ReadState) -> str:
    """Return what the part of a state that was summed is called."""
    for name, section in zip(state.names, state.sections, strict=True):
        if section.span.start == noted.start:
            return f"section {name}"
    if noted.start == 0:
        return "the head" if noted.nbytes <= state.saved.container.state.start else "the state"
    return f"section {i}"
