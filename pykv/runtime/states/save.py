"""Saving: what a context holds, as a file that a crash leaves whole, or as bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv.cells.arguments import sequence_id
from pykv.errors import ParamError
from pykv.memory.state_files import StateImage
from pykv.memory.state_part import ALL
from pykv.runtime.states.identity import setup_of
from pykv.runtime.states.saved_file import PREVIOUS, notes_before
from pykv.runtime.states.section_sums import SectionSums
from pykv.state_format import (
    Dialect,
    Notes,
    Sink,
    context_head,
    new_content,
    sequence_bytes_head,
    sequence_head,
    session_head,
    side_car,
    trailer_pieces,
    write_durably,
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
    """

    extra: Mapping[str, Any] | None = None
    attachments: Mapping[str, Buffer] | None = None

    def pieces(self, notes: Notes) -> list[Buffer]:
        """Return the bytes of notes with these remarks."""
        return trailer_pieces(replace(notes, extra=dict(self.extra or {})), self.attachments)


def save_session(
    context: Context, path: str | os.PathLike[str], tokens: Sequence[int], remarks: Remarks, dialect: Dialect
) -> int:
    """Write all of a context, and notes in a file beside it. Returns the bytes of the session."""
    head = session_head(token_array(tokens), context.model.hparams.architecture, dialect)
    image = context.memory.state_image(ALL, dialect=dialect)
    sums = SectionSums([len(head), *image.section_nbytes])
    _all([head, image], sums.add)
    notes = replace(setup_of(context), sections=sums.sections)
    beside, before = side_car(path), notes_before(path)
    attachments = dict(remarks.attachments or {}) | ({PREVIOUS: before} if before else {})
    # the notes first, with the old ones in them: at no instant is there a session without notes about it
    write_durably(beside, replace(remarks, attachments=attachments).pieces(notes))
    with new_content(path) as write:
        _all([head, image], write)
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

    sums = SectionSums([len(head), *image.section_nbytes])
    with new_content(path) as write:

        def write_summed(piece: Buffer) -> None:
            sums.add(piece)
            write(piece)

        _all([head, image], write_summed)
        notes = remarks.pieces(replace(setup_of(context), sections=sums.sections))
        _all(notes, write)
    return len(head) + image.nbytes + sum(memoryview(piece).nbytes for piece in notes)


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
