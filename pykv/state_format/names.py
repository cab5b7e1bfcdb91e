"""Names of files that hold states: those that users choose are data, not paths.

Source: session.md section 7.
"""

from __future__ import annotations

import os
from pathlib import Path

from pykv.errors import ParamError

SUFFIX = ".pykv"
"""What the name of notes on a session has more than the session's."""

_FORBIDDEN = frozenset('/\\:*?"<>|')
_SEPARATORS = tuple(each for each in (os.sep, os.altsep) if each)
_LOOK_ALIKES = frozenset("\uff0e\u2215\u2216\ufffd\ufeff")
"""Full-width period, division slash, set minus, and marks that stand for other characters or none."""


def safe_name(name: str) -> str:
    """Return a name that came from a user if it can only be a file's in one directory, on any system.

    Raises
    ------
    ParamError : it is empty, too long, or could be a path, a stream, or something else than it looks like.
    """
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise ParamError(f"file name {name!r}: not valid UTF-8") from error
    bad = sorted({c for c in name if c in _FORBIDDEN or c in _LOOK_ALIKES or _is_control(c)})
    if not 1 <= nbytes <= 255:
        raise ParamError(f"file name {name[:40]!r}: {nbytes} bytes, expected 1 to 255")
    if bad:
        raise ParamError(f"file name {name!r}: must not contain {', '.join(map(repr, bad))}")
    if name == "." or ".." in name:
        raise ParamError(f"file name {name!r}: must be neither '.' nor contain '..'")
    if name[0] == " " or name[-1] in " .":
        raise ParamError(f"file name {name!r}: must not begin with a space or end in a space or a dot")
    return name


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character <= "\x9f"


def plain_path(path: object, name: str = "path") -> str:
    """Return a path as text, if a file can have it.

    Parameters
    ----------
    name : the argument that it was, for the message.

    Raises
    ------
    ParamError : it is no path, or that of no file.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
        os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        raise ParamError(f"{name}={ascii(path)[:80]} must be the path of a file") from None
    if not text:
        raise ParamError(f"{name}={text!r} is empty, it must be the path of a file")
    if "\0" in text:
        raise ParamError(f"{name}={text!r} must be the path of a file, which holds no NUL byte")
    if text.endswith(_SEPARATORS):
        raise ParamError(f"{name}={text!r} is a folder's, it must be the path of a file")
    return text


def side_car(path: str | os.PathLike[str]) -> Path:
    """Return the path of what pykv writes beside a session file; of a link, beside the file that it leads to."""
    text = os.fsdecode(path)
    return Path(f"{os.path.realpath(text) if os.path.islink(text) else text}{SUFFIX}")


def session_of(path: str | os.PathLike[str]) -> str | None:
    """Return the session beside which a file's name says that it lies, see `side_car`; None where it says no such."""
    name = os.fspath(path)
    return name.removesuffix(SUFFIX) if name.endswith(SUFFIX) and Path(name).name != SUFFIX else None
