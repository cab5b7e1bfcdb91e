"""Writes a file so that a crash at any instant leaves the old one or the new one, never a part of either.

Source: session.md section 7: a temporary file beside it, fsync, an atomic rename, fsync of the directory.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

SMALL = 1 << 16
"""Pieces below this many bytes are collected, so that a head does not cost a system call."""

_MODE = 0o666
"""As open() asks for; the umask takes away what nobody should have."""

_OPEN_FILES = "/proc/self/fd"

_COPIED_AT_ONCE = 1 << 20


Sink = Callable[["Buffer"], object]
"""Takes bytes, and is done with them when it returns."""


@contextmanager
def new_content(path: str | os.PathLike[str]) -> Iterator[Sink]:
    """Give what takes the new content of a file, piece by piece; the file has it once the with statement has ended.

    A link is followed; an existing file's mode is kept.

    Raises
    ------
    OSError : with the errno of what failed; names the path and the bytes. What was there before is unchanged.
    """
    target = os.path.realpath(path)
    temporary = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.pykv-tmp")
    writer = _Writer()

    @contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            why = f"{error.strerror}; {writer.n_written} bytes written, the file is as it was before"
            raise OSError(error.errno, why, os.fspath(path)) from error

    def write(piece: Buffer) -> None:
        with told():
            writer.write(piece)

    try:
        with told():
            writer.open(temporary, _mode_of(target))
        yield write
        with told():
            writer.close(temporary)
            os.replace(temporary, target)
    except BaseException:
        writer.give_up(temporary)
        raise
    with told():
        _sync_directory(os.path.dirname(target))


def write_durably(path: str | os.PathLike[str], pieces: Iterable[Buffer]) -> int:
    """Write pieces, one after another, as the new content of a file; errors as in `new_content`.

    Each piece is written before the next is asked for, so all may come from one staging buffer.

    Returns
    -------
    The bytes written.
    """
    n_written = 0
    with new_content(path) as write:
        for piece in pieces:
            n_written += memoryview(piece).nbytes
            write(piece)
    return n_written


def _mode_of(target: str) -> int | None:
    """Return the mode of the file that will be replaced, None if there is none; refuse what is no plain file."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a plain file")
    return stat.S_IMODE(found.st_mode)


class _Writer:
    """A temporary file while it is written: collects small pieces, and goes on where a write was short.

    Where the system can, the file has no name until it is complete, so that a process that is killed leaves nothing.
    """

    def __init__(self) -> None:
        self.n_written = 0
        self._fd = -1
        self._has_name = False
        self._pending = bytearray()

    def open(self, temporary: str, mode: int | None) -> None:
        self._fd = _open_without_name(os.path.dirname(temporary))
        if self._fd < 0:
            self._fd = _open_new(temporary)
            self._has_name = True
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(self._fd, mode)

    def write(self, piece: Buffer) -> None:
        with memoryview(piece).cast("B") as view:
            if len(self._pending) + len(view) <= SMALL:
                self._pending += view
                return
            self._flush()
            if len(view) <= SMALL:
                self._pending += view
            else:
                self._write_all(view)

    def close(self, temporary: str) -> None:
        """Write what is left, wait until it is on the disk, and give the file its name."""
        self._flush()
        os.fsync(self._fd)
        if not self._has_name:
            self._name(temporary)
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _name(self, temporary: str) -> None:
        try:
            os.link(f"{_OPEN_FILES}/{self._fd}", temporary, src_dir_fd=self._fd)  # with it, the link is followed
        except OSError:  # some file systems make files without a name and cannot name them later
            unnamed, self._fd = self._fd, _open_new(temporary)
            try:
                os.fchmod(self._fd, stat.S_IMODE(os.fstat(unnamed).st_mode))
                self._copy(unnamed)
            finally:
                os.close(unnamed)

    def _copy(self, source: int) -> None:
        n, self.n_written = self.n_written, 0
        while self.n_written < n:
            self._write_all(memoryview(os.pread(source, _COPIED_AT_ONCE, self.n_written)))
        os.fsync(self._fd)

    def give_up(self, temporary: str) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with suppress(OSError):
            os.unlink(temporary)

    def _flush(self) -> None:
        with memoryview(self._pending) as view:
            self._write_all(view)
        self._pending.clear()

    def _write_all(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            n = os.write(self._fd, view[at:])
            at += n
            self.n_written += n


def _open_new(path: str) -> int:
    """Return a file whose name nobody had."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, _MODE)


def _open_without_name(directory: str) -> int:
    """Return a file in a directory that has no name there; -1 where there can be none."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir(_OPEN_FILES):
        return -1
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, _MODE)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return -1
        raise


def _sync_directory(directory: str) -> None:
    """Make the rename last, where the system lets directories be synchronised."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
