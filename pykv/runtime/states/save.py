"""Saving: what a context holds, as a file that a crash leaves whole, or as bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv.cells.arguments import sequence_id, shown
from pykv.errors import ParamError, StateError
from pykv.memory.state_files import StateImage
from pykv.memory.state_part import ALL
from pykv.runtime.states.identity import setup_of
from pykv.runtime.states.section_sums import SectionSums
from pykv.runtime.states.side_notes import PREVIOUS, side_car_pieces
from pykv.state_format import (
    Dialect,
    Notes,
    Sink,
    context_head,
    new_content,
    new_contents,
    plain_path,
    sequence_bytes_head,
    sequence_head,
    session_head,
    side_car,
    trailer_pieces,
)
from pykv.typing import I32Array

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pykv.runtime.context import Context


@dataclass(frozen=True)
class Remarks:
    """What a caller wants to find again beside a state.

    Attributes
    ----------
    extra : anything that JSON holds: the state of a sampler, text.
    attachments : bytes by name, such as ``state_bytes(seq_id, partial=True)`` of earlier ends of the sequence.

    Raises
    ------
    ParamError : they cannot be saved; names the argument.
    """

    extra: Mapping[str, Any] | None = None
    attachments: Mapping[str, Buffer] | None = None

    def __post_init__(self) -> None:
        for name, value in (("extra", self.extra), ("attachments", self.attachments)):
            if value is not None and not isinstance(value, Mapping):
                raise ParamError(f"{name}={shown(value)}: must be a dict")
            for key in value or ():
                if not isinstance(key, str):
                    raise ParamError(f"{name}: the name {shown(key)} must be a text")
        for key, data in (self.attachments or {}).items():
            _check_attachment(key, data)
        try:
            trailer_pieces(Notes(extra=dict(self.extra or {})))
        except StateError as error:
            raise ParamError(f"extra={shown(self.extra)}: must be what JSON holds: {error}") from None

    def on(self, notes: Notes) -> Notes:
        """Return notes with what is extra."""
        return replace(notes, extra=dict(self.extra or {}))


def _check_attachment(name: str, data: Buffer) -> None:
    if name == PREVIOUS:
        raise ParamError(f"attachments[{name!r}]: pykv uses this name, take another")
    try:
        is_contiguous = memoryview(data).contiguous
    except (TypeError, ValueError, BufferError):
        raise ParamError(f"attachments[{name!r}]={shown(data)}: must be bytes") from None
    if not is_contiguous:
        raise ParamError(f"attachments[{name!r}]: must be bytes that lie together")


def save_session(
    context: Context, path: str | os.PathLike[str], tokens: Sequence[int], remarks: Remarks, dialect: Dialect
) -> int:
    """Write all of a context, and notes in a file beside it. Returns the bytes of the session."""
    path = plain_path(path)
    head = session_head(token_array(tokens), context.model.hparams.architecture, dialect)
    image = context.memory.state_image(ALL, dialect=dialect)
    with new_contents(side_car(path), path) as (note, write):
        notes = remarks.on(_write_summed(write, head, image, setup_of(context)))
        _all(side_car_pieces(notes, remarks.attachments or {}, path), note)
    return len(head) + image.nbytes


def save_sequence(
    context: Context,
    path: str | os.PathLike[str],
    seq_id: int,
    tokens: Sequence[int],
    remarks: Remarks,
    dialect: Dialect,
) -> int:
    """Write one sequence, and notes behind it. Returns the bytes of the file."""
    seq_id = sequence_id("seq_id", seq_id, context.memory.n_seq_max)
    head = sequence_head(token_array(tokens), dialect)
    image = context.memory.state_image(seq_id, dialect=dialect)
    with new_content(path) as write:
        notes = remarks.on(_write_summed(write, head, image, setup_of(context)))
        pieces = trailer_pieces(notes, {**(remarks.attachments or {})})
        _all(pieces, write)
    return len(head) + image.nbytes + sum(memoryview(piece).nbytes for piece in pieces)


def _write_summed(write: Sink, head: bytes, image: StateImage, notes: Notes) -> Notes:
    """Write a state; return the notes with its checksums."""
    sums = SectionSums([len(head), *image.section_nbytes])

    def write_summed(piece: Buffer) -> None:
        sums.add(piece)
        write(piece)

    _all([head, image], write_summed)
    return replace(notes, sections=sums.sections)


def state_bytes(context: Context, seq_id: int | None, partial: bool, dialect: Dialect) -> memoryview:
    """Return one sequence, or with None all, in the form that llama.cpp keeps in memory."""
    if seq_id is None:
        which, head = ALL, context_head(context.model.hparams.architecture)
    else:
        which = sequence_id("seq_id", seq_id, context.memory.n_seq_max)
        head = sequence_bytes_head(which)
    image = context.memory.state_image(which, partial, dialect)
    # numpy's memory comes in large pages, that of bytes in small ones, which take longer to get than to fill
    out, at = np.empty(len(head) + image.nbytes, np.uint8), 0

    def write(piece: Buffer) -> None:
        nonlocal at
        view = np.frombuffer(memoryview(piece), np.uint8)
        out[at : at + view.size] = view
        at += view.size

    _all([head, image], write)
    return out.data.toreadonly()


def token_array(tokens: Sequence[int]) -> I32Array:
    """Return (n,) int32; raises `ParamError` where an element is no such integer."""
    found = np.asarray(tokens)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ParamError(f"tokens: expected a sequence of integers, found {found.dtype} of shape {found.shape}")
    if found.size and not -(2**31) <= int(found.min()) <= int(found.max()) < 2**31:
        raise ParamError(f"tokens: {int(found.min())} to {int(found.max())} is more than 32 bits hold")
    return found.astype(np.int32)


def parse_dialect(name: str | Dialect) -> Dialect:
    """Return a dialect by the versions of its files, session first: "11/4"."""
    for each in Dialect:
        if name in (each, str(each)):
            return each
    raise ParamError(f"dialect={name!r}: must be one of {', '.join(map(str, Dialect))}")


def _all(pieces: Sequence[Buffer | StateImage], sink: Sink) -> None:
    for piece in pieces:
        if isinstance(piece, StateImage):
            piece.write_to(sink)
        else:
            sink(memoryview(piece))
