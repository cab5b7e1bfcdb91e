"""Cursor: reads numbers off the bytes of a state, and never further than they go.

A length that was read is held against the bytes that are left before anything is made of it.
"""

from __future__ import annotations

import struct
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from pykv.errors import StateError
from pykv.typing import I32Array

if TYPE_CHECKING:
    from typing_extensions import Buffer

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")


def mismatch(what: str, expected: object, found: object, offset: int | None) -> StateError:
    """Return the error that says what was expected, what was found and where."""
    where = "" if offset is None else f", at byte {offset}"
    return StateError(f"{what}: expected {expected}, found {found}{where}", offset=offset)


class Cursor:
    """A place in some bytes, and the end beyond which it does not go. To be used in a with statement.

    Attributes
    ----------
    data : the bytes, not copied.
    at : the byte to be read next.
    stop : the byte behind the last.
    """

    def __init__(self, data: Buffer, at: int = 0, stop: int | None = None) -> None:
        self.data = memoryview(data).cast("B")
        self.stop = len(self.data) if stop is None else stop
        self.at = at
        if not 0 <= at <= self.stop <= len(self.data):
            raise ValueError(f"bytes {at} to {self.stop} of {len(self.data)}")

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.data.release()

    @property
    def left(self) -> int:
        return self.stop - self.at

    def need(self, nbytes: int, what: str) -> None:
        """Refuse what would not fit into the bytes that are left."""
        if nbytes > self.left:
            raise mismatch(what, f"{nbytes} bytes", f"the end after {self.left}", self.at)

    def skip(self, nbytes: int, what: str) -> int:
        """Go over some bytes and return where they start."""
        self.need(nbytes, what)
        start, self.at = self.at, self.at + nbytes
        return start

    def u32(self, what: str) -> int:
        return self._number(_U32, what)

    def i32(self, what: str) -> int:
        return self._number(_I32, what)

    def u64(self, what: str) -> int:
        return self._number(_U64, what)

    def _number(self, form: struct.Struct, what: str) -> int:
        number: int = form.unpack_from(self.data, self.skip(form.size, what))[0]
        return number

    def bytes(self, nbytes: int, what: str) -> bytes:
        """Return a copy of the next bytes."""
        start = self.skip(nbytes, what)
        return self.data[start : self.at].tobytes()

    def words(self, n: int, what: str) -> I32Array:
        """Return a copy of the next `n` 32-bit numbers, (n,)."""
        start = self.skip(4 * n, what)
        return np.frombuffer(self.data, "<i4", n, start).astype(np.int32)
