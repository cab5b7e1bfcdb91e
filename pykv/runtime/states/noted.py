"""The file beside a session: notes on it that were named in place of the session itself."""

from __future__ import annotations

import os
from contextlib import suppress

from pykv.errors import StateError
from pykv.state_format import Trailer, mapped, read_container, read_side_car, session_of


def notes_in(path: str | os.PathLike[str]) -> Trailer | None:
    """Return the notes in a file that holds nothing else; None where it is something else.

    Raises
    ------
    OSError : it cannot be read.
    StateError : its name is that of such notes, and what is in it is damaged.
    """
    session = session_of(path)
    try:
        with mapped(path, "notes on a session") as data:
            return read_side_car(data)
    except StateError as error:
        if session is None or not os.path.exists(session) or _is_state(path):
            return None
        why = str(error).removeprefix(f"{os.fspath(path)}: ")
        raise StateError(
            f"{os.fspath(path)}: damaged notes on a session: {why}; the session is {session}, "
            "and is read without them if they are removed",
            offset=error.offset,
        ) from None


def _is_state(path: str | os.PathLike[str]) -> bool:
    with suppress(StateError), mapped(path) as data:
        read_container(data)
        return True
    return False


def refuse_notes(path: str | os.PathLike[str]) -> None:
    """Raise `StateError` where a file holds notes on a session in place of a state."""
    if notes_in(path) is not None:
        where = session_of(path) or "the file of the same name without .pykv"
        raise StateError(f"{os.fspath(path)}: holds the notes on a session, not the session; that is {where}")
