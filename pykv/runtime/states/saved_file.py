"""SavedFile: a saved state as a file, opened without a model: what it is, what it notes, and where its state lies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Self

from pykv.cells.arguments import shown
from pykv.errors import AttachmentError, ParamError, StateError, UseAfterCloseError
from pykv.runtime.states.noted import refuse_notes
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


class Attachments(dict[str, memoryview]):
    """Attachments by name; `AttachmentError` names those that there are where one is asked for that is not."""

    def __missing__(self, name: object) -> NoReturn:
        known = f"it has {', '.join(map(repr, self))}" if self else "it has none"
        raise AttachmentError(f"attachments[{shown(name)}]: no such attachment in the saved state; {known}")


@dataclass(eq=False, repr=False)
class SavedFile:
    """A saved state in memory, or mapped: of a file, only what is looked at is read. Close it, or use it in ``with``.

    Attributes
    ----------
    container : its kind, and what its head says.
    data : all of it.
    notes : None where nothing is noted, as in files that llama.cpp wrote.
    attachments : what the caller of `save_session` or `save_sequence` gave, by name; views that stay valid as long as
        they are held, and whose checksum was right when the file was opened.
    path : of the file; None for bytes in memory.
    """

    container: Container
    data: Buffer
    notes: Notes | None = None
    attachments: Mapping[str, memoryview] = field(default_factory=Attachments)
    path: str | None = None
    _files: ExitStack = field(default_factory=ExitStack)
    _closed: bool = False

    @property
    def kind(self) -> str:
        """What it is: "session file", "sequence file", "context state" or "sequence state"."""
        return self.container.kind.value

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
        self._require_open()
        start, nbytes = self.container.state
        kind, dialect = self.container.kind, self.container.dialect
        return parse_unknown(self.data, start, whole=kind.whole, dialect=dialect, stop=start + nbytes)

    def verify(self) -> None:
        """Compare the state with the checksums that were noted; raises `StateError` where one differs."""
        self._require_open()
        if self.notes is not None:
            verify_sections(self.data, self.notes)

    def close(self) -> None:
        """Let go of the file. What was read of it stays. Safe to call twice."""
        self._closed = True
        self._files.close()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = [self.kind, f"{self.container.state.nbytes} bytes of state"]
        parts += [f"{len(self.tokens)} tokens"] if self.container.tokens is not None else []
        parts += [f"extra {list(self.extra)}"] if self.extra else []
        parts += [f"attachments {list(self.attachments)}"] if self.attachments else []
        parts += ["closed"] if self._closed else []
        name = "" if self.path is None else f"{self.path!r}: "
        return f"<{type(self).__name__} {name}{', '.join(parts)}>"

    def _require_open(self) -> None:
        if self._closed:
            raise UseAfterCloseError(f"{self!r} is closed")

    @classmethod
    def of_bytes(cls, data: Buffer) -> SavedFile:
        """Read the head of a state that was kept in memory."""
        try:
            view = memoryview(data).cast("B")
        except TypeError:
            raise ParamError(f"data: must be bytes that lie together, found {type(data).__name__}") from None
        if not len(view):
            raise StateError("data: no bytes, expected those that state_bytes returned", offset=0)
        return cls(read_container(view), view)


def open_state(path: str | os.PathLike[str]) -> SavedFile:
    """Open a session file, with the notes beside it, or a sequence file, with those behind it. Needs no model.

    Close what it returns, or use it in ``with``: ``with pykv.open_state("a.ggsq") as saved: print(saved.extra)``.

    Raises
    ------
    ParamError : no file can have such a path.
    OSError : it cannot be read.
    StateError : it is no saved state, or its head or the notes on it are damaged. Its rows are not looked at, see
        `SavedFile.verify`.
    """
    with ExitStack() as stack, naming(path):
        try:
            saved = _opened(plain_path(path), stack)
        except StateError:
            refuse_notes(path)
            raise
        saved._files = stack.pop_all()
        return saved


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
    behind = _notes_behind(data)
    if behind is not None:
        return _with(path, read_container(data, behind.span.start), data, behind, data)
    container = read_container(data)
    if not container.kind.whole or not side_car(path).is_file():
        return SavedFile(container, data, path=path)
    beside, source = notes_beside(path, data, stack)
    return _with(path, container, data, beside, source)


def _notes_behind(data: Buffer) -> Trailer | None:
    try:
        return read_trailer(data)
    except StateError as error:
        what = "the notes behind the state are damaged"
        raise StateError(f"{what}: {error}; take another copy of the file", offset=error.offset) from None


def _with(path: str, container: Container, data: Buffer, trailer: Trailer, source: Buffer) -> SavedFile:
    return SavedFile(container, data, trailer.notes, Attachments(attachments_of(trailer, source)), path)
