"""Writes a file so that a crash at any instant leaves the old one or the new one, never a part of either.

Source: session.md section 7: a temporary file beside it, fsync, an atomic rename, fsync of the directory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pykv.state_format.leftovers import remove_leftovers
from pykv.state_format.names import plain_path
from pykv.state_format.temporary import TemporaryFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
    that fails midway, files that were not there before are taken away again. What killed writers left in their folders
    is removed before.
    """
    files = [_NewFile(path) for path in paths]
    for folder in {one.folder for one in files}:
        remove_leftovers(folder)
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
    folder : where it is.
    is_in_place : whether the file has its new content.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = plain_path(path)
        self._target = os.path.realpath(self._path)
        self.folder = os.path.dirname(self._target)
        self._new = TemporaryFile(self.folder)
        self._was_there = False
        self.is_in_place = False

    def open(self) -> None:
        with self._told():
            mode = _mode_of(self._target)
            self._was_there = mode is not None
            self._new.open(mode)

    def write(self, piece: Buffer) -> None:
        with self._told():
            self._new.write(piece)

    def complete(self) -> None:
        """Have all of it on the disk, under another name."""
        with self._told():
            self._new.complete()

    def put_in_place(self) -> None:
        with self._told():
            self._new.move_to(self._target)
            self.is_in_place = True
            _sync_directory(self.folder)

    def give_up(self, *, keep: bool) -> None:
        """Take away what is not in its place, and unless told to `keep` it, a file that was not there before."""
        self._new.give_up()
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
            is_there = os.path.isdir(self.folder)
            what = error.strerror if is_there else f"{error.strerror}: {self.folder} is no folder"
            raise OSError(error.errno, f"{what}; {self._fate()}", self._path) from error

    def _fate(self) -> str:
        """Say what there is now."""
        if self.is_in_place:
            return "the new file is in its place, and may be gone after a power cut"
        if not self._new.n_written:
            return "nothing was written"
        left = "the file is as it was before" if self._was_there else "none of them is kept"
        return f"{self._new.n_written} bytes written, {left}"


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
