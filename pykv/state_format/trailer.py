"""What pykv adds to a saved state: notes that llama.cpp has no place for, and attachments.

They follow the state in a sequence file, whose reader stops before them, and stand in a file of their own beside a
session file, which must end where its state does. They are found from the end:

    attachments | notes (JSON) | u32 version, u64 bytes of notes, u64 bytes of all | checksum of all before | magic
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from pykv.errors import StateError
from pykv.state_format.checksum import Checksum, checksum
from pykv.state_format.cursor import mismatch
from pykv.state_format.records import Span

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"pykvnote"
VERSION = 1
_NUMBERS = struct.Struct("<IQQ")
_FOOT_NBYTES = _NUMBERS.size + 16 + len(MAGIC)

Json = Any
"""None, a bool, a number, a text, or lists and objects of these."""


@dataclass(frozen=True)
class SectionSum:
    """Bytes of the file that belong to one section, and their checksum."""

    start: int
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Notes:
    """What is noted about a state.

    Attributes
    ----------
    model : what tells the model from others; None = not noted.
    rope : how positions were turned into rotations.
    types : element types of the memory.
    sections : checksums of what is saved, in order.
    extra : whatever the caller wants back: the sampler's state, text.
    embedded : whether there are cells of embeddings, such as a picture's, which have no token.
    """

    model: str | None = None
    rope: Mapping[str, Json] = field(default_factory=dict)
    types: Mapping[str, Json] = field(default_factory=dict)
    sections: tuple[SectionSum, ...] = ()
    extra: Mapping[str, Json] = field(default_factory=dict)
    embedded: bool = False


@dataclass(frozen=True)
class Trailer:
    """Notes as they were read, where each attachment lies, and the bytes that all of it takes."""

    notes: Notes
    attachments: dict[str, Span]
    span: Span


def trailer_pieces(notes: Notes, attachments: Mapping[str, Buffer | list[Buffer]] | None = None) -> list[Buffer]:
    """Return the bytes of a trailer in pieces, attachments not copied.

    Parameters
    ----------
    attachments : bytes by name, each in one piece or in a list of them.

    Raises
    ------
    StateError : the notes hold what JSON does not.
    """
    parts = {name: data if isinstance(data, list) else [data] for name, data in (attachments or {}).items()}
    pieces: list[Buffer] = [piece for data in parts.values() for piece in data]
    sizes = {name: sum(memoryview(piece).nbytes for piece in data) for name, data in parts.items()}
    text = _to_json({**_said(notes), "attachments": [{"name": n, "nbytes": size} for n, size in sizes.items()]})
    n_all = sum(sizes.values()) + len(text) + _FOOT_NBYTES
    pieces += [text, _NUMBERS.pack(VERSION, len(text), n_all)]
    total = Checksum()
    for piece in pieces:
        total.add(piece)
    return [*pieces, total.digest() + MAGIC]


def _said(notes: Notes) -> dict[str, Json]:
    """Return notes as JSON has them; what a caller gave is not copied, however deep it is."""
    said: dict[str, Json] = {"model": notes.model, "rope": dict(notes.rope), "types": dict(notes.types)}
    said |= {"sections": [asdict(each) for each in notes.sections], "extra": notes.extra}
    return said | ({"embedded": True} if notes.embedded else {})


def _to_json(value: Json) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"notes that cannot be saved: {error}") from error


def read_trailer(data: Buffer, stop: int | None = None) -> Trailer | None:
    """Return the trailer that ends where the bytes do; None where none does.

    Raises
    ------
    StateError : there is one, and it is damaged or of another version.
    """
    with memoryview(data).cast("B") as view:
        end = len(view) if stop is None else stop
        if end < _FOOT_NBYTES or view[end - len(MAGIC) : end] != MAGIC:
            return None
        at = end - _FOOT_NBYTES
        version, n_notes, n_all = _NUMBERS.unpack_from(view, at)
        if version != VERSION:
            raise mismatch("trailer: version", VERSION, version, at)
        if not _FOOT_NBYTES <= n_all <= end:
            raise mismatch("trailer: number of bytes", f"{_FOOT_NBYTES} to {end}", n_all, at + 12)
        if n_notes > n_all - _FOOT_NBYTES:
            raise mismatch("trailer: bytes of notes", f"at most {n_all - _FOOT_NBYTES}", n_notes, at + 4)
        span = Span(end - n_all, n_all)
        with view[span.start : at + _NUMBERS.size] as summed:
            _check_sum(summed, view[at + _NUMBERS.size : end - len(MAGIC)].hex(), "trailer", span.start)
        notes_at = at - n_notes
        said = _from_json(view[notes_at:at].tobytes(), notes_at)
        return Trailer(_notes(said, notes_at), _attachments(said, Span(span.start, notes_at - span.start)), span)


def read_side_car(data: Buffer) -> Trailer:
    """Return the trailer that is all there is in these bytes.

    Raises
    ------
    StateError : they are none, or damaged, or there is more.
    """
    trailer = read_trailer(data)
    if trailer is None:
        raise mismatch("side-car", f"{MAGIC!r} at its end", "something else", None)
    if trailer.span.start:
        raise mismatch("side-car", "nothing before the trailer", f"{trailer.span.start} bytes", 0)
    return trailer


def verify_sections(data: Buffer, notes: Notes, stop: int | None = None) -> None:
    """Compare the sections of a file with the checksums that were noted.

    Raises
    ------
    StateError : one differs, or lies beyond the bytes.
    """
    with memoryview(data).cast("B") as view:
        end = len(view) if stop is None else stop
        for section in notes.sections:
            stop = section.start + section.nbytes
            what = f"bytes {section.start} to {stop - 1}"
            if stop > end:
                raise mismatch(what, f"up to byte {stop}", f"{end} bytes", end)
            with view[section.start : stop] as summed:
                _check_sum(summed, section.checksum, what, section.start)


def _check_sum(data: memoryview, expected: str, what: str, offset: int) -> None:
    found = checksum(data)
    if found != expected:
        raise mismatch(f"{what}: checksum", expected, found, offset)


def _from_json(text: bytes, at: int) -> dict[str, Json]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        value = json.loads(text.decode("ascii"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise StateError(f"trailer: notes are not JSON: {error}, at byte {at}", offset=at) from error
    notes: dict[str, Json] = _need(value, dict, "notes", at)
    return notes


def _need(value: Json, kind: type | tuple[type, ...], what: str, at: int) -> Json:
    """Return a value that is of the kind it should be; a bool is no int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        expected = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise mismatch(f"trailer: {what}", expected, type(value).__name__, at)
    return value


def _size(value: Json, what: str, at: int) -> int:
    number: int = _need(value, int, what, at)
    if not 0 <= number < 2**63:
        raise mismatch(f"trailer: {what}", "0 to 2^63 - 1", str(number)[:24], at)
    return number


def _notes(said: dict[str, Json], at: int) -> Notes:
    objects = {name: _need(said.get(name), dict, name, at) for name in ("rope", "types", "extra")}
    sections = tuple(_section(each, at) for each in _need(said.get("sections"), list, "sections", at))
    for before, section in pairwise(sections):
        if section.start < before.start + before.nbytes:  # else a few notes could ask for hours of checksums
            expected = f"{before.start + before.nbytes} or more, the end of the one before"
            raise mismatch("trailer: start of a section", expected, section.start, at)
    embedded: bool = _need(said.get("embedded", False), bool, "embedded", at)
    model = _need(said.get("model"), (str, type(None)), "model", at)
    return Notes(model, sections=sections, embedded=embedded, **objects)


def _section(said: Json, at: int) -> SectionSum:
    entry = _need(said, dict, "section", at)
    start, nbytes = (_size(entry.get(name), f"{name} of a section", at) for name in ("start", "nbytes"))
    return SectionSum(start, nbytes, _need(entry.get("checksum"), str, "checksum of a section", at))


def _attachments(said: dict[str, Json], room: Span) -> dict[str, Span]:
    """Return where each attachment lies; together they must fill the room that is there for them."""
    found: dict[str, Span] = {}
    at = room.start
    for each in _need(said.get("attachments"), list, "attachments", room.start):
        entry = _need(each, dict, "attachment", at)
        name = _need(entry.get("name"), str, "name of an attachment", at)
        nbytes = _size(entry.get("nbytes"), f"bytes of attachment {name!r}", at)
        if name in found:
            raise mismatch("trailer: name of an attachment", "one of its own", repr(name), at)
        found[name] = Span(at, nbytes)
        at += nbytes
    if at != room.start + room.nbytes:
        raise mismatch("trailer: bytes of attachments", room.nbytes, at - room.start, room.start)
    return found
