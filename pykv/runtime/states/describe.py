"""What a saved state holds, in plain words and numbers that JSON holds. Needs no model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from pykv.runtime.states.examine import Examined, examined
from pykv.runtime.states.matched_cells import NOBODY
from pykv.runtime.states.noted import notes_in
from pykv.runtime.states.read_state import ReadState, cells_of, width_of
from pykv.runtime.states.side_notes import PREVIOUS
from pykv.state_format import (
    CellRecords,
    KVSection,
    Notes,
    RowsRecord,
    Section,
    StreamRecords,
    Trailer,
    session_of,
    type_name,
)
from pykv.typing import I32Array

NOTES = "notes on a session"
"""The kind of a file that holds no state, but what pykv noted of the session beside it."""


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a saved state holds: its head, sections, cells, tensors, and the notes on it.

    Of a damaged one, as much as can be read; what is wrong is told, not raised: ``faults``. Of the file beside a
    session, the notes: ``kind`` is `NOTES`, and ``session`` the file that they are about.

    Raises
    ------
    OSError : it cannot be read.
    StateError : it is no saved state, or can be read in several ways.
    """
    trailer = notes_in(path)
    if trailer is not None:
        return _side_car(path, trailer)
    with examined(path) as found:
        state = found.state
        container = state.saved.container
        named = zip(state.names, state.sections, strict=True)
        return {
            "file": os.fspath(path),
            "kind": container.kind.value,
            "dialect": str(state.dialect),
            "says_dialect": container.dialect is not None,
            "architecture": container.arch,
            "sequence": container.seq_id,
            "tokens": None if container.tokens is None else container.tokens.tolist(),
            "nbytes": len(state.data),
            "state_nbytes": container.state.nbytes,
            "is_whole": not found.is_cut,
            "sections": [_section(name, section, state) for name, section in named],
            "checksums": _checksums(found),
            "faults": [one._asdict() for one in found.faults],
            "notes": _notes_of(state),
        }


def _side_car(path: str | os.PathLike[str], trailer: Trailer) -> dict[str, Any]:
    attachments = {name: span.nbytes for name, span in trailer.attachments.items()}
    return {
        "file": os.fspath(path),
        "kind": NOTES,
        "session": session_of(path),
        "nbytes": trailer.span.nbytes,
        "checksums": {"n_noted": len(trailer.notes.sections)},
        "faults": [],
        "notes": _notes(trailer.notes, attachments),
    }


def _checksums(found: Examined) -> dict[str, Any]:
    notes = found.state.saved.notes
    n_noted = 0 if notes is None else len(notes.sections)
    return {"n_noted": n_noted, "is_verified": bool(n_noted) and not found.wrong, "wrong": list(found.wrong)}


def _notes_of(state: ReadState) -> dict[str, Any] | None:
    saved = state.saved
    sizes = {name: len(data) for name, data in saved.attachments.items()}
    return None if saved.notes is None else _notes(saved.notes, sizes)


def _notes(notes: Notes, attachments: dict[str, int]) -> dict[str, Any]:
    return {
        "model": notes.model,
        "rope": dict(notes.rope),
        "types": dict(notes.types),
        "extra": dict(notes.extra),
        "attachments": {name: nbytes for name, nbytes in attachments.items() if name != PREVIOUS},
    }


def _section(name: str, section: Section, state: ReadState) -> dict[str, Any]:
    said: dict[str, Any] = {"name": name, "nbytes": section.span.nbytes}
    if isinstance(section, KVSection):
        streams = [_stream(stream, state) for stream in section.streams]
        return said | {"n_stream": len(streams), "streams": streams}
    cells = cells_of(section)[0]
    tensors = {"R": _tensors(section.r, cells.n), "S": _tensors(section.s, cells.n)}
    return said | {"n_layer": section.n_layer} | _cells(cells, state) | {"tensors": tensors}


def _stream(stream: StreamRecords, state: ReadState) -> dict[str, Any]:
    said = _cells(stream.cells, state)
    if stream.v_trans is None:
        return said
    return said | {
        "has_ext": stream.cells.ext is not None,
        "v_layout": "channel" if stream.v_trans else "cell",
        "rotation": None if stream.rot is None else list(stream.rot),
        "tensors": {"K": _tensors(stream.k, stream.cells.n), "V": _tensors(stream.v, stream.cells.n)},
    }


def _cells(cells: CellRecords, state: ReadState) -> dict[str, Any]:
    """Return how many cells there are, and which positions of whom."""
    owner, ids = cells.cell_of_id, cells.ids
    if not state.is_whole and not ids.size:  # a state that does not say whose it is
        own = state.sequences()
        owner, ids = np.arange(cells.n), np.full(cells.n, own[0] if own else 0)
    who = [{"sequence": int(s), **_positions(cells.pos[owner[ids == s]])} for s in np.unique(ids)]
    free = cells.pos[cells.n_ids == 0] if state.is_whole else np.empty(0, np.int32)
    if free.size:
        who.append({"sequence": NOBODY, **_positions(free)})
    return {"n_cells": cells.n, "sequences": who}


def _positions(pos: I32Array) -> dict[str, Any]:
    """Return how many cells, and the runs of their positions, the last one included."""
    distinct = np.unique(pos)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(distinct) != 1) + 1))
    stops = np.append(starts[1:], distinct.size) - 1
    runs = [[int(distinct[a]), int(distinct[b])] for a, b in zip(starts, stops, strict=True)]
    return {"n_cells": pos.size, "positions": runs}


def _tensors(rows: Sequence[RowsRecord], n_cells: int) -> list[dict[str, Any]]:
    """Return neighbours that are alike together."""
    return [
        {"n": n, "type": type_name(dtype), "width": width, "nbytes": n * n_cells * row_bytes}
        for (dtype, width, row_bytes), group in groupby(rows, lambda one: (one.dtype, width_of(one), one.row_bytes))
        for n in [len(list(group))]
    ]
