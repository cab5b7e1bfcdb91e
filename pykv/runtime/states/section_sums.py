"""SectionSums: checksums of a saved state's head and of each of its sections, added up as their bytes pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pykv.state_format import Checksum, SectionSum

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SectionSums:
    """Told of all bytes in pieces, none of which is of two parts.

    Parameters
    ----------
    sizes : bytes of each part, in order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._left = list(sizes)
        self._sums: list[SectionSum] = []
        self._begin(0)

    def add(self, piece: Buffer) -> None:
        """Go on with these bytes."""
        self._sum.add(piece)
        self._n += memoryview(piece).nbytes
        if self._left and self._n == self._left[0]:
            self._sums.append(SectionSum(self._start, self._left.pop(0), self._sum.hex()))
            self._begin(self._start + self._n)

    @property
    def sections(self) -> tuple[SectionSum, ...]:
        """What has passed whole."""
        return tuple(self._sums)

    def _begin(self, start: int) -> None:
        self._start, self._n, self._sum = start, 0, Checksum()
