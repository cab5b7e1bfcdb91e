"""Region: memory that two processes share, in a file without a name, so that nothing of it outlives them."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile

from pykv.errors import AllocError

_LEAST = 2**20


class Region:
    """Shared memory that grows when more is asked for; either side may let it grow.

    Only one side speaks at a time: who does so owns all of it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Region:
        """Return an empty one."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("pykv"))
        fd, path = tempfile.mkstemp(prefix="pykv-")
        os.unlink(path)
        return cls(fd)

    def view(self, n_bytes: int) -> memoryview:
        """Return the first `n_bytes`; what was returned before stays valid, and the same memory.

        Raises
        ------
        AllocError : the system has no room for so much.
        """
        if self._map is None or len(self._map) < n_bytes:
            self._map = self._mapped(max(1, n_bytes))
        return memoryview(self._map)[:n_bytes]

    def close(self) -> None:
        """Let go of the file. Views that are still held keep the memory."""
        self._map = None
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _mapped(self, n_bytes: int) -> mmap.mmap:
        size = os.fstat(self.fd).st_size
        try:
            if size < n_bytes:
                size = max(_LEAST, 1 << (n_bytes - 1).bit_length())
                _reserve(self.fd, size)
            return mmap.mmap(self.fd, size)
        except (OSError, OverflowError, ValueError) as error:
            raise AllocError(f"no room for {n_bytes} bytes shared with the process of the model: {error}") from None


def _reserve(fd: int, size: int) -> None:
    """Let a file have its size, with memory behind it: what is merely promised ends the process when it is missing."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
                raise
        else:
            return
    os.ftruncate(fd, size)
