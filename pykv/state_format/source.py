"""A saved file as bytes, mapped: nothing is read before somebody looks at it."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pykv.errors import StateError


@contextmanager
def mapped(path: str | os.PathLike[str]) -> Iterator[mmap.mmap]:
    """Map a file for reading while the with statement lasts; views of it should be gone by then.

    note: who shortens the file meanwhile ends this process. `write_durably` never does, it puts another in its place.

    Raises
    ------
    OSError : it cannot be opened, or is a directory, a pipe or a device.
    StateError : it is empty.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait for its writer
    try:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", os.fspath(path))
        if not found.st_size:
            raise StateError(f"{os.fspath(path)}: expected a saved state, found an empty file", offset=0)
        data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    try:
        yield data
    finally:
        with suppress(BufferError):  # an error on its way out may hold views; with the last of them the mapping goes
            data.close()
