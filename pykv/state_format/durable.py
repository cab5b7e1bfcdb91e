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

from pykv.state_format.names import plain_path

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


Sink = Callable[["Buffer"], object]
"""Takes bytes, and is done with them when it returns."""


@contextmanager
def new_content(path: str | os.PathLike[str]) -> Iterator[Sink]:
    """Give what takes the new content of a file, piece by piece; the file has it once the with statement has ended.

    A link is followed; an existing file's mode is kept.

    Raises
    ------
    ParamError : no file can have such a path.
    OSError : with the errno of what failed; names the path and the bytes. What was there before is unchanged.
    """
    with new_contents(path) as (write,):
        yield write


@contextmanager
def new_contents(*paths: str | os.PathLike[str]) -> Iterator[tuple[Sink, ...]]:
    """Give what takes the new content of each of some files; errors as in `new_content`.

    All are whole and on the disk before the first file has its new content; they get it in the order of the paths. If
    that fails midway, files that were not there before are taken away again.
    """
    files = [_NewFile(path) for path in paths]
    try:
        for one in reversed(files):  # the last is what the caller means, the others go with it
            one.open()
        yield tuple(one.write for one in files)
        for one in files:
            one.complete()
        for one in files:
            one.put_in_place()
    except BaseException:
        for one in files:
            one.give_up(keep=files[-1].is_in_place)
        raise


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


class _NewFile:
    """New content of a file, from the first byte to its place.

    Attributes
    ----------
    is_in_place : whether the file has its new content.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = plain_path(path)
        self._target = os.path.realpath(self._path)
        self._temporary = os.path.join(os.path.dirname(self._target), f".{secrets.token_hex(8)}.pykv-tmp")
        self._writer = _Writer()
        self._was_there = False
        self.is_in_place = False

    def open(self) -> None:
        with self._told():
            mode = _mode_of(self._target)
            self._was_there = mode is not None
            self._writer.open(self._temporary, mode)

    def write(self, piece: Buffer) -> None:
        with self._told():
            self._writer.write(piece)

    def complete(self) -> None:
        """Have all of it on the disk, under another name."""
        with self._told():
            self._writer.close(self._temporary)

    def put_in_place(self) -> None:
        with self._told():
            os.replace(self._temporary, self._target)
            self.is_in_place = True
            _sync_directory(os.path.dirname(self._target))

    def give_up(self, *, keep: bool) -> None:
        """Take away what is not in its place, and unless told to `keep` it, a file that was not there before."""
        self._writer.give_up(self._temporary)
        if self.is_in_place and not self._was_there and not keep:
            with suppress(OSError):
                os.unlink(self._target)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            folder = os.path.dirname(self._target)
            what = error.strerror if os.path.isdir(folder) else f"{error.strerror}: {folder} is no folder"
            raise OSError(error.errno, f"{what}; {self._fate()}", self._path) from error

    def _fate(self) -> str:
        """Say what there is now."""
        if self.is_in_place:
            return "the new file is in its place, and may be gone after a power cut"
        if not self._writer.n_written:
            return "nothing was written"
        left = "the file is as it was before" if self._was_there else "none of them is kept"
        return f"{self._writer.n_written} bytes written, {left}"


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
        self._n_begun = 0
        self._disk: ThreadPoolExecutor | None = None
        self._begun: list[Future[None]] = []

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
        self._wait()
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
        with suppress(OSError):
            self._wait()
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
