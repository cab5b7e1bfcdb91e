"""SavedFile: a saved state as a file, opened without a model: what it is, what it notes, and where its state lies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykv.errors import StateError
from pykv.state_format import (
    Container,
    Notes,
    Trailer,
    mapped,
    read_container,
    read_side_car,
    read_trailer,
    side_car,
    trailer_pieces,
    verify_sections,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

PREVIOUS = "previous"
"""The attachment of a side-car with the one before it: that is about the old session, until the new one is there."""


@dataclass(frozen=True, eq=False)
class SavedFile:
    """A saved state in memory, or mapped.

    Attributes
    ----------
    container : its kind, and what its head says.
    data : all of it.
    notes : None where nothing is noted, as in files that llama.cpp wrote.
    attachments : what the caller of `save_session` or `save_sequence` gave, by name.
    """

    container: Container
    data: Buffer
    notes: Notes | None
    attachments: Mapping[str, bytes]

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the caller of `save_session` or `save_sequence` wanted back."""
        return {} if self.notes is None else self.notes.extra

    def verify(self) -> None:
        """Compare the state with the checksums that were noted; raises `StateError` where one differs."""
        if self.notes is not None:
            verify_sections(self.data, self.notes)

    @classmethod
    def of_bytes(cls, data: Buffer) -> SavedFile:
        """Read the head of a state that was kept in memory."""
        return cls(read_container(data), data, None, {})


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[SavedFile]:
    """Open a session file, with the notes beside it, or a sequence file, with those behind it.

    Raises
    ------
    OSError : it cannot be read.
    StateError : it is no saved state, or is damaged.
    """
    with mapped(path) as data:
        trailer = read_trailer(data)
        if trailer is not None:
            yield _with(read_container(data, trailer.span.start), data, trailer, data)
            return
        container, beside = read_container(data), side_car(path)
        if not container.kind.whole or not beside.is_file():
            yield SavedFile(container, data, None, {})
            return
        with mapped(beside) as notes:
            yield _beside(container, data, notes, beside)


def notes_before(path: str | os.PathLike[str]) -> bytes | None:
    """Return the notes beside a session that is to be replaced, without those that they hold in turn."""
    with suppress(OSError, StateError), mapped(side_car(path)) as data:
        trailer = read_side_car(data)
        kept = {name: data[at : at + n] for name, (at, n) in trailer.attachments.items() if name != PREVIOUS}
        return b"".join(bytes(piece) for piece in trailer_pieces(trailer.notes, kept))
    return None


def _beside(container: Container, data: Buffer, notes: Buffer, path: Path) -> SavedFile:
    """Return a session with the notes beside it: the newest that are about these bytes."""
    source: Buffer | None = notes
    while source is not None:
        trailer = read_side_car(source)
        found = _with(container, data, trailer, source)
        if _is_about(trailer, data):
            return found
        source = found.attachments.get(PREVIOUS)
    raise StateError(
        f"{path}: notes on another session than the one beside it: that is damaged, or was written by another program; "
        "remove the notes to load it without"
    )


def _is_about(trailer: Trailer, data: Buffer) -> bool:
    try:
        verify_sections(data, trailer.notes)
    except StateError:
        return False
    return bool(trailer.notes.sections)


def _with(container: Container, data: Buffer, trailer: Trailer, source: Buffer) -> SavedFile:
    with memoryview(source).cast("B") as view:
        attachments = {
            name: bytes(view[span.start : span.start + span.nbytes]) for name, span in trailer.attachments.items()
        }
    return SavedFile(container, data, trailer.notes, attachments)
