"""A file under another name, or none, until it is complete and on the disk: then it takes the place of one.

Where the system can, it has no name until then, so that a process that is killed leaves nothing. Else, and between
the two, what it leaves is found by the next one; see `leftovers`.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from pykv.state_format.leftovers import HAS_LOCKS, claim, temporary_name

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from typing_extensions import Buffer

SMALL = 1 << 16
"""Pieces below this many bytes are collected, so that a head does not cost a system call."""

EARLY = 1 << 25
"""After so many bytes the disk begins with what is there, while the next ones are made."""

_MODE = 0o666
"""As open() asks for; the umask takes away what nobody should have."""

_OPEN_FILES = "/proc/self/fd"

_COPIED_AT_ONCE = 1 << 20

_TRIES = 100
"""More names than other processes take away before they are locked."""


class TemporaryFile:
    """New content while it is written: collects small pieces, and goes on where a write was short.

    Parameters
    ----------
    folder : where it will have its place.

    Attributes
    ----------
    n_written : bytes, without those that are still collected.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path: str | None = None
        self.n_written = 0
        self._fd = -1
        self._pending = bytearray()
        self._n_begun = 0
        self._disk: ThreadPoolExecutor | None = None
        self._begun: list[Future[None]] = []

    def open(self, mode: int | None) -> None:
        """Make the file, with the mode that it shall have; None = as any new one."""
        self._fd = _open_without_name(self._folder)
        if self._fd < 0:
            self._open_with_name()
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(self._fd, mode)

    def write(self, piece: Buffer) -> None:
        """Take the next bytes."""
        with memoryview(piece).cast("B") as view:
            if len(self._pending) + len(view) <= SMALL:
                self._pending += view
                return
            self._flush()
            if len(view) <= SMALL:
                self._pending += view
            else:
                self._write_all(view)

    def complete(self) -> None:
        """Write what is left, wait until it is on the disk, and give the file a name."""
        self._flush()
        self._wait()
        os.fsync(self._fd)
        if self._path is None:
            self._give_name()
        if not HAS_LOCKS:  # which is all that it would be kept open for; and Windows moves no open file
            self._close()

    def move_to(self, target: str) -> None:
        """Take the place of a file."""
        assert self._path is not None, "it is complete"
        os.replace(self._path, target)
        self._path = None
        self._close()

    def give_up(self) -> None:
        """Let nothing be left."""
        with suppress(OSError):
            self._wait()
        self._close()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def _open_with_name(self) -> None:
        for _ in range(_TRIES):
            path = os.path.join(self._folder, temporary_name())
            self._fd, self._path = _open_new(path), path
            if claim(self._fd, path):
                return
            self.give_up()
        raise BlockingIOError(errno.EAGAIN, "other processes take every new file for one that was left")

    def _give_name(self) -> None:
        self._path = os.path.join(self._folder, temporary_name())
        try:
            os.link(f"{_OPEN_FILES}/{self._fd}", self._path, src_dir_fd=self._fd)  # with it, the link is followed
        except OSError:  # some file systems make files without a name and cannot name them later
            unnamed, self._fd, self._path = self._fd, -1, None
            try:
                self._open_with_name()
                os.fchmod(self._fd, stat.S_IMODE(os.fstat(unnamed).st_mode))
                self._copy(unnamed)
            finally:
                os.close(unnamed)

    def _copy(self, source: int) -> None:
        n, self.n_written = self.n_written, 0
        while self.n_written < n:
            self._write_all(memoryview(os.pread(source, _COPIED_AT_ONCE, self.n_written)))
        os.fsync(self._fd)

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
        if self.n_written - self._n_begun >= EARLY:
            self._begin()

    def _begin(self) -> None:
        """Let another thread wait until the disk has what is written so far."""
        from concurrent.futures import ThreadPoolExecutor  # for large files alone

        self._n_begun = self.n_written
        self._disk = self._disk or ThreadPoolExecutor(1)
        self._begun.append(self._disk.submit(os.fsync, self._fd))

    def _wait(self) -> None:
        """Wait for what was begun; raises what went wrong, of which a later fsync would know nothing."""
        if self._disk is None:
            return
        self._disk.shutdown()
        self._disk = None
        for each in self._begun:
            each.result()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open_new(path: str) -> int:
    """Return a file whose name nobody had."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, _MODE)


def _open_without_name(folder: str) -> int:
    """Return a locked file in a folder that has no name there; -1 where there can be none."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir(_OPEN_FILES):
        return -1
    try:
        fd = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, _MODE)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return -1
        raise
    claim(fd)
    return fd
