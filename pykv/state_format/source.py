"""A saved file as bytes, mapped: nothing is read before somebody looks at it."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pykv.errors import StateError
from pykv.state_format.names import plain_path


@contextmanager
def mapped(path: str | os.PathLike[str], what: str = "a saved state") -> Iterator[mmap.mmap]:
    """Map a file for reading while the with statement lasts, or longer: until the last view of it is gone.

    note: who shortens the file meanwhile ends this process. `write_durably` never does, it puts another in its place.

    Parameters
    ----------
    what : what it should hold, for the message.

    Raises
    ------
    ParamError : no file can have such a path.
    OSError : it cannot be opened, or is a directory, a pipe or a device.
    StateError : it is empty.
    """
    path = plain_path(path)
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait for its writer
    try:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", path)
        if not found.st_size:
            raise StateError(f"{path}: expected {what}, found an empty file", offset=0)
        data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    try:
        yield data
    finally:
        with suppress(BufferError):  # somebody, such as an error on its way out, may hold views
            data.close()
