"""The file that a trace is written to or read from: a path that can be one, and a regular file there."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

from pykv.cells.arguments import shown
from pykv.errors import ParamError, TraceError


def trace_path(path: object) -> Path:
    """Return a path, given as a text, as bytes or as what stands for one.

    Raises
    ------
    ParamError : it can be none.
    """
    try:
        name = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        name = ""
    if not name or "\0" in name:
        raise ParamError(f"path={shown(path)} must be the path of a file")
    return Path(name)


def require_regular(path: Path) -> None:
    """Refuse what cannot be written or read from its beginning, and might wait for ever, such as a pipe.

    Raises
    ------
    TraceError : there is something, and it is no regular file.
    OSError : there is nothing, or nobody may look.
    """
    if not S_ISREG(path.stat().st_mode):
        raise TraceError(f"{path}: not a regular file")
