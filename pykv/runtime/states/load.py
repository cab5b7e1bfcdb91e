"""Loading: a file or bytes into a context, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pykv.cells.arguments import boolean, sequence_id
from pykv.errors import NoSlotError, StateError
from pykv.memory.state_part import ALL
from pykv.runtime.states.identity import check_setup
from pykv.runtime.states.misfit import parsed
from pykv.runtime.states.noted_tokens import first_outside, has_pictures, held_by_state, tokens_misfit
from pykv.runtime.states.saved_file import SavedFile, naming, open_state
from pykv.runtime.states.warn import warn_caller
from pykv.state_format import Kind, Section, side_car

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pykv.runtime.context import Context

_LOADED_BY = {
    Kind.SESSION_FILE: "load_session(path)",
    Kind.SEQUENCE_FILE: "load_sequence(path, seq_id)",
    Kind.CONTEXT_BYTES: "load_state_bytes(data)",
    Kind.SEQUENCE_BYTES: "load_state_bytes(data, seq_id)",
}


@dataclass(frozen=True)
class _Wanted:
    """What is to be loaded.

    Attributes
    ----------
    seq_id : the sequence that gets it, or `ALL`.
    name : of the file, for messages; empty for bytes.
    """

    seq_id: int
    name: str = ""
    partial: bool = False
    strict: bool = True
    doubts: list[str] = field(default_factory=list)


def load_session(context: Context, path: str | os.PathLike[str], *, strict: bool) -> list[int]:
    """Let a context hold what a session file holds, and nothing else. Returns its tokens."""
    return _load_file(context, path, Kind.SESSION_FILE, ALL, strict=strict)


def load_sequence(context: Context, path: str | os.PathLike[str], seq_id: int, *, strict: bool) -> list[int]:
    """Let a sequence be the one in a sequence file. Returns its tokens."""
    seq_id = sequence_id("seq_id", seq_id, context.memory.n_seq_max)
    return _load_file(context, path, Kind.SEQUENCE_FILE, seq_id, strict=strict)


def load_bytes(context: Context, data: Buffer, seq_id: int | None, *, partial: bool, strict: bool) -> None:
    """Let a sequence, or with None all of a context, be what `state_bytes` returned."""
    which = ALL if seq_id is None else sequence_id("seq_id", seq_id, context.memory.n_seq_max)
    partial, strict = boolean("partial", partial), boolean("strict", strict)
    saved = SavedFile.of_bytes(data)
    _need_kind(saved, Kind.CONTEXT_BYTES if seq_id is None else Kind.SEQUENCE_BYTES)
    _load(context, saved, _Wanted(which, partial=partial, strict=strict))


def _load_file(context: Context, path: str | os.PathLike[str], kind: Kind, seq_id: int, *, strict: bool) -> list[int]:
    with open_state(path) as saved, naming(path):
        _need_kind(saved, kind)
        _check_tokens(context, saved)
        wanted = _Wanted(seq_id, os.fsdecode(path), strict=boolean("strict", strict))
        wanted.doubts.extend(_doubts(context, saved, wanted))
        _load(context, saved, wanted)
        context.embedded |= saved.notes is not None and saved.notes.embedded
        return saved.tokens


def _check_tokens(context: Context, saved: SavedFile) -> None:
    tokens = saved.container.tokens
    assert tokens is not None
    room, n_vocab = context.n_ctx, context.model.hparams.n_vocab
    if tokens.size > room:
        raise StateError(f"{tokens.size} tokens, and the context has room for {room}: give it a larger n_ctx", offset=8)
    i = first_outside(tokens, n_vocab)
    if i is not None:
        raise StateError(f"token {i} is {tokens[i]}, the vocabulary has {n_vocab}", offset=12 + 4 * i)


def _doubts(context: Context, saved: SavedFile, wanted: _Wanted) -> list[str]:
    """Return what speaks against a file that can be loaded all the same; raises where it cannot."""
    if saved.notes is None:
        copied = f"; if it was copied without {side_car(wanted.name)}, copy that too" if wanted.seq_id == ALL else ""
        return [f"nothing says which model the state is of; if of another one, what follows is nonsense{copied}"]
    try:
        saved.verify()
    except StateError as error:
        what = "the file is damaged: take another copy of it"
        if saved.container.kind.whole:
            what = "the session is damaged, or not that of the notes beside it: take another copy of both"
        raise StateError(f"{error}; {what}", offset=error.offset) from None
    return check_setup(saved.notes, context, strict=wanted.strict)


def _load(context: Context, saved: SavedFile, wanted: _Wanted) -> None:
    container, memory = saved.container, context.memory
    arch = context.model.hparams.architecture
    if container.arch is not None and container.arch != arch:
        raise StateError(f"the state is of the family {container.arch!r}, and the model of {arch!r}")
    sections = parsed(saved, memory, partial=wanted.partial, strict=wanted.strict)
    for doubt in (*wanted.doubts, *_doubts_on_tokens(saved, sections)):
        _warn(wanted, doubt)  # before anything changes: a program may have made warnings errors
    with _told_what_helps(wanted.name):
        converted = memory.load_state(wanted.seq_id, sections, saved.data, wanted.partial, convert=not wanted.strict)
    if converted and not converted.is_lossless:
        _warn(
            wanted,
            f"the state was converted: {'; '.join(converted.what)}; largest error, as a part of a row's largest "
            f"element: K {converted.error_k:.2g}, V {converted.error_v:.2g}",
        )


def _doubts_on_tokens(saved: SavedFile, sections: tuple[Section, ...]) -> list[str]:
    tokens = saved.container.tokens
    if tokens is None or not tokens.size:
        return []
    held = held_by_state(sections, is_whole=saved.container.kind.whole)
    is_text = not (saved.notes is not None and saved.notes.embedded) and not has_pictures(sections)
    misfit = tokens_misfit(tokens.size, held, is_text=is_text, who="the state")
    return [] if misfit is None else [f"{misfit}: they are not all that was decoded, or of something else"]


@contextmanager
def _told_what_helps(name: str) -> Iterator[None]:
    """Let a lack of room be told with the file's name and what makes some."""
    try:
        yield
    except NoSlotError as error:
        of = f"{name}: " if name else ""
        raise NoSlotError(f"{of}{error}; remove other sequences first, or give the context a larger n_ctx") from None


def _warn(wanted: _Wanted, what: str) -> None:
    warn_caller(f"{wanted.name}: {what}" if wanted.name else what)


def _need_kind(saved: SavedFile, kind: Kind) -> None:
    found = saved.container.kind
    if found is kind:
        return
    data = ", data being the bytes of the file" if found in _BYTES and kind not in _BYTES else ""
    raise StateError(f"expected a {kind.value}, found a {found.value}: {_LOADED_BY[found]} loads one{data}", offset=0)


_BYTES = (Kind.CONTEXT_BYTES, Kind.SEQUENCE_BYTES)
"""Kinds that have no file of their own."""
