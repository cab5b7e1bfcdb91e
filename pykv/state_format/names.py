"""Names of files that hold states: those that users choose are data, not paths.

Source: session.md section 7.
"""

from __future__ import annotations

import os
from pathlib import Path

from pykv.errors import ParamError

_FORBIDDEN = frozenset('/\\:*?"<>|')
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


def side_car(path: str | os.PathLike[str]) -> Path:
    """Return the path of what pykv writes beside a session file."""
    return Path(f"{os.fspath(path)}.pykv")
