"""Checksums of saved bytes: XXH3, 128 bits. They find damage, not intent.

Source: the XXH3 algorithm, https://xxhash.com.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK = 1 << 22
"""Bytes that are summed at once, so that a mapped file need not be in memory as a whole."""


class Checksum:
    """The checksum of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, data: Buffer) -> None:
        """Go on with these bytes; not copied, and other threads run meanwhile."""
        with memoryview(data).cast("B") as view:
            for at in range(0, len(view), CHUNK):
                self._state.update(view[at : at + CHUNK])

    def digest(self) -> bytes:
        """Return the checksum of all bytes so far, 16 bytes."""
        return self._state.digest()

    def hex(self) -> str:
        """Return the checksum of all bytes so far, 32 characters."""
        return self._state.hexdigest()


def checksum(data: Buffer) -> str:
    """Return the checksum of some bytes, 32 characters."""
    total = Checksum()
    total.add(data)
    return total.hex()
