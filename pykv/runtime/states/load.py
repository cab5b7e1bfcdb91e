"""Loading: a file or bytes into a context, whole or not at all."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pykv.cells.arguments import boolean, sequence_id
from pykv.errors import StateError
from pykv.memory.state_part import ALL
from pykv.runtime.states.identity import check_setup
from pykv.runtime.states.misfit import parsed
from pykv.runtime.states.saved_file import SavedFile, naming, open_state
from pykv.state_format import Kind

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Buffer

    from pykv.runtime.context import Context

_LOADED_BY = {
    Kind.SESSION_FILE: "load_session(path)",
    Kind.SEQUENCE_FILE: "load_sequence(path, seq_id)",
    Kind.CONTEXT_BYTES: "load_state_bytes(data)",
    Kind.SEQUENCE_BYTES: "load_state_bytes(data, seq_id)",
}


def load_session(context: Context, path: str | os.PathLike[str], *, strict: bool) -> list[int]:
    """Let a context hold what a session file holds, and nothing else. Returns its tokens."""
    with open_state(path) as saved, naming(path):
        return _load_file(context, saved, Kind.SESSION_FILE, ALL, strict=strict)


def load_sequence(context: Context, path: str | os.PathLike[str], seq_id: int, *, strict: bool) -> list[int]:
    """Let a sequence be the one in a sequence file. Returns its tokens."""
    seq_id = sequence_id("seq_id", seq_id, context.memory.n_seq_max)
    with open_state(path) as saved, naming(path):
        return _load_file(context, saved, Kind.SEQUENCE_FILE, seq_id, strict=strict)


def load_bytes(context: Context, data: Buffer, seq_id: int | None, *, partial: bool, strict: bool) -> None:
    """Let a sequence, or with None all of a context, be what `state_bytes` returned."""
    which = ALL if seq_id is None else sequence_id("seq_id", seq_id, context.memory.n_seq_max)
    saved = SavedFile.of_bytes(data)
    _need_kind(saved, Kind.CONTEXT_BYTES if seq_id is None else Kind.SEQUENCE_BYTES)
    _load(context, saved, which, partial=partial, strict=boolean("strict", strict))


def _load_file(context: Context, saved: SavedFile, kind: Kind, seq_id: int, *, strict: bool) -> list[int]:
    _need_kind(saved, kind)
    tokens = saved.container.tokens
    assert tokens is not None
    room, n_vocab = context.n_ctx, context.model.hparams.n_vocab
    if tokens.size > room:
        raise StateError(f"{tokens.size} tokens, and the context has room for {room}: give it a larger n_ctx", offset=8)
    bad = np.flatnonzero((tokens < 0) | (tokens >= n_vocab))
    if bad.size:
        i = int(bad[0])
        raise StateError(f"token {i} is {tokens[i]}, the vocabulary has {n_vocab}", offset=12 + 4 * i)
    strict = boolean("strict", strict)
    _load(context, saved, seq_id, partial=False, strict=strict, doubts=_doubts(context, saved, strict=strict))
    return saved.tokens


def _doubts(context: Context, saved: SavedFile, *, strict: bool) -> list[str]:
    """Return what speaks against a file that can be loaded all the same; raises where it cannot."""
    if saved.notes is None:
        return ["nothing says which model the state is of; if of another one, what follows is nonsense"]
    try:
        saved.verify()
    except StateError as error:
        what = "the file is damaged: take another copy of it"
        if saved.container.kind.whole:
            what = "the session is damaged, or not that of the notes beside it: take another copy of both"
        raise StateError(f"{error}; {what}", offset=error.offset) from None
    return check_setup(saved.notes, context, strict=strict)


def _load(
    context: Context, saved: SavedFile, seq_id: int, *, partial: bool, strict: bool, doubts: Sequence[str] = ()
) -> None:
    container, memory = saved.container, context.memory
    arch = context.model.hparams.architecture
    if container.arch is not None and container.arch != arch:
        raise StateError(f"the state is of the family {container.arch!r}, and the model of {arch!r}")
    sections = parsed(saved, memory.state_layouts(partial), strict=strict)
    for doubt in doubts:  # before anything changes: a program may have made warnings errors
        _warn(doubt)
    converted = memory.load_state(seq_id, sections, saved.data, partial, convert=not strict)
    if converted and not converted.is_lossless:
        _warn(
            f"the state was converted: {'; '.join(converted.what)}; largest error, as a part of a row's largest "
            f"element: K {converted.error_k:.2g}, V {converted.error_v:.2g}"
        )


def _need_kind(saved: SavedFile, kind: Kind) -> None:
    found = saved.container.kind
    if found is kind:
        return
    data = ", data being the bytes of the file" if found in _BYTES and kind not in _BYTES else ""
    raise StateError(f"expected a {kind.value}, found a {found.value}: {_LOADED_BY[found]} loads one{data}", offset=0)


_BYTES = (Kind.CONTEXT_BYTES, Kind.SEQUENCE_BYTES)
"""Kinds that have no file of their own."""


def _warn(message: str) -> None:
    """Warn of the line that called into pykv, however deep in it this is."""
    level, frame = 1, sys._getframe()
    above: FrameType | None = frame
    while above is not None and str(above.f_globals.get("__name__")).partition(".")[0] == "pykv":
        level, above = level + 1, above.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)
