"""Saving: what a context holds, as a file that a crash leaves whole, or as bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pykv.cells.arguments import sequence_id
from pykv.errors import ParamError
from pykv.memory.state_files import StateImage
from pykv.memory.state_part import ALL
from pykv.runtime.states.identity import setup_of
from pykv.runtime.states.noted_tokens import checked_tokens, held_by_context, tokens_misfit
from pykv.runtime.states.remarks import Remarks
from pykv.runtime.states.section_sums import SectionSums
from pykv.runtime.states.side_notes import refuse_target, side_car_pieces
from pykv.runtime.states.warn import warn_caller
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


def save_session(
    context: Context, path: str | os.PathLike[str], tokens: Sequence[int], remarks: Remarks, dialect: Dialect
) -> int:
    """Write all of a context, and notes in a file beside it. Returns the bytes of the session."""
    path = _place(path)
    refuse_target(path, has_side_car=True)
    array = _tokens_of(tokens, context, None)
    head = session_head(array, context.model.hparams.architecture, dialect)
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
    path = _place(path)
    refuse_target(path, has_side_car=False)
    array = _tokens_of(tokens, context, seq_id)
    head = sequence_head(array, dialect)
    image = context.memory.state_image(seq_id, dialect=dialect)
    with new_content(path) as write:
        notes = remarks.on(_write_summed(write, head, image, setup_of(context)))
        pieces = trailer_pieces(notes, {**(remarks.attachments or {})})
        _all(pieces, write)
    return len(head) + image.nbytes + sum(memoryview(piece).nbytes for piece in pieces)


def _place(path: str | os.PathLike[str]) -> str:
    """Return the path of a file to be written; raises `OSError` where it is one from a folder that is gone."""
    text = plain_path(path)
    try:
        os.path.abspath(text)
    except OSError as error:
        what = f"{error.strerror}: the working directory is gone; nothing was written"
        raise OSError(error.errno, what, text) from None
    return text


def _tokens_of(tokens: Sequence[int], context: Context, seq_id: int | None) -> I32Array:
    """Return the tokens to be noted; warns where they cannot be what a sequence, or with None the context, holds."""
    found = checked_tokens(tokens, context)
    held = held_by_context(context, seq_id) if found.size else []
    who = "the context" if seq_id is None else f"sequence {seq_id}"
    misfit = tokens_misfit(found.size, held, is_text=not context.embedded, who=who)
    if misfit is not None:
        warn_caller(f"{misfit}: `tokens` should be all that was decoded, and at most the one sampled last beside them")
    return found


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
