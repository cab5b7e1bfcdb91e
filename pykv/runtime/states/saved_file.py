"""SavedFile: a saved state as a file, opened without a model: what it is, what it notes, and where its state lies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pykv.errors import ParamError, StateError
from pykv.runtime.states.side_notes import attachments_of, notes_beside
from pykv.state_format import (
    Container,
    Found,
    Notes,
    Trailer,
    mapped,
    parse_unknown,
    plain_path,
    read_container,
    read_trailer,
    side_car,
    verify_sections,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, eq=False)
class SavedFile:
    """A saved state in memory, or mapped: of a file, only what is looked at is read.

    Attributes
    ----------
    container : its kind, and what its head says.
    data : all of it.
    notes : None where nothing is noted, as in files that llama.cpp wrote.
    attachments : what the caller of `save_session` or `save_sequence` gave, by name; views that stay valid as long as
        they are held, and whose checksum was right when the file was opened.
    """

    container: Container
    data: Buffer
    notes: Notes | None = None
    attachments: Mapping[str, memoryview] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """The tokens that are noted in it."""
        tokens = self.container.tokens
        return [] if tokens is None else [int(one) for one in tokens]

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the caller of `save_session` or `save_sequence` wanted back, as JSON has it: lists for tuples."""
        return {} if self.notes is None else self.notes.extra

    def parsed(self) -> Found:
        """Find its sections, of whichever memory it is; raises `StateError` where there are none."""
        start, nbytes = self.container.state
        kind, dialect = self.container.kind, self.container.dialect
        return parse_unknown(self.data, start, whole=kind.whole, dialect=dialect, stop=start + nbytes)

    def verify(self) -> None:
        """Compare the state with the checksums that were noted; raises `StateError` where one differs."""
        if self.notes is not None:
            verify_sections(self.data, self.notes)

    @classmethod
    def of_bytes(cls, data: Buffer) -> SavedFile:
        """Read the head of a state that was kept in memory."""
        try:
            view = memoryview(data).cast("B")
        except TypeError:
            raise ParamError(f"data: must be bytes that lie together, found {type(data).__name__}") from None
        return cls(read_container(view), view)


@contextmanager
def open_state(path: str | os.PathLike[str]) -> Iterator[SavedFile]:
    """Open a session file, with the notes beside it, or a sequence file, with those behind it. Needs no model.

    Raises
    ------
    ParamError : no file can have such a path.
    OSError : it cannot be read.
    StateError : it is no saved state, or its head or the notes on it are damaged. Its rows are not looked at, see
        `SavedFile.verify`.
    """
    with ExitStack() as stack:
        with naming(path):
            saved = _opened(plain_path(path), stack)
        yield saved


def named(error: StateError, path: str | os.PathLike[str]) -> StateError:
    """Return what is wrong with a saved state, beginning with its path."""
    name, text = os.fsdecode(path), str(error)
    is_named = text.startswith((f"{name}: ", f"{side_car(name)}: "))
    return error if is_named else StateError(f"{name}: {text}", offset=error.offset)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let what is wrong with a saved state begin with its path."""
    try:
        yield
    except StateError as error:
        raise named(error, path) from None


def _opened(path: str, stack: ExitStack) -> SavedFile:
    data = stack.enter_context(mapped(path))
    behind = read_trailer(data)
    if behind is not None:
        return _with(read_container(data, behind.span.start), data, behind, data)
    container = read_container(data)
    if not container.kind.whole or not side_car(path).is_file():
        return SavedFile(container, data)
    beside, source = notes_beside(path, data, stack)
    return _with(container, data, beside, source)


def _with(container: Container, data: Buffer, trailer: Trailer, source: Buffer) -> SavedFile:
    return SavedFile(container, data, trailer.notes, attachments_of(trailer, source))
