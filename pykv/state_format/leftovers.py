"""Temporary files: how they are named and locked, so that those of killed writers are found and removed, and no others.

A writer holds a lock on its file until that has its place. The system takes it back however the process ends, so that
whoever gets the lock knows that nobody writes there any more.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from contextlib import suppress
from functools import cache

try:
    import fcntl
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True
    """Whether open files can be locked."""

STALE_SECONDS = 86_400
"""Files of other machines, whose locks may not be seen here, are left when nobody has written to them for so long."""

_NAME = re.compile(r"\.[0-9a-f]{16,24}\.pykv-tmp")

_KERNEL_ID = "/proc/sys/kernel/random/boot_id"


def temporary_name() -> str:
    """Return a name that no file has: which system runs, where that can be told, and chance."""
    return f".{_kernel()}{secrets.token_hex(8)}.pykv-tmp"


def claim(fd: int, path: str | None = None) -> bool:
    """Lock a file that was just made, until its last descriptor is closed.

    Where there are no locks, the file is not locked: then nobody gets a lock on it and removes it either.

    Parameters
    ----------
    path : its name, if it has one.

    Returns
    -------
    False where another process has taken it for a leftover in between; it is gone, or soon will be.
    """
    if not HAS_LOCKS:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return path is None or os.path.lexists(path)


def remove_leftovers(folder: str) -> None:
    """Remove the temporary files of dead writers from a folder; one of which that cannot be told stays."""
    if not HAS_LOCKS:
        return
    with suppress(OSError):
        for name in filter(_NAME.fullmatch, os.listdir(folder)):
            with suppress(OSError):
                _remove_if_left(folder, name)


def _remove_if_left(folder: str, name: str) -> None:
    path = os.path.join(folder, name)
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        is_ours = _kernel() and name.startswith(f".{_kernel()}")
        if stat.S_ISREG(found.st_mode) and (is_ours or time.time() - found.st_mtime > STALE_SECONDS):
            os.unlink(path)
    finally:
        os.close(fd)


def _open(path: str) -> int:
    """Open a file for locking: network file systems lock what may be written alone."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_WRONLY)
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)


@cache
def _kernel() -> str:
    """Return eight digits by which a running system differs from others and from its earlier runs; "" = unknown."""
    try:
        with open(_KERNEL_ID, encoding="ascii") as file:
            found = re.match(r"[0-9a-f]{8}", file.read(8))
    except (OSError, ValueError):
        return ""
    return found[0] if found else ""
