"""Which stored positions a sliding window hides from a query.

Pure arithmetic on positions: knows no cells. Follows llama.cpp's ``llama_hparams::is_masked_swa``.

    query p1 = 6, n_swa = 4      0 1 2 3 4 5 6 7 8
    STANDARD                     . . . # # # # # #     (the causal test hides 7 and 8)
    CHUNKED                      . . . . # # # # #
    SYMMETRIC                    . . . . # # # # #     (|p1 - p0| <= 2)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from pykv.errors import ParamError
from pykv.typing import POS_INF, BoolArray, I64Array

Pos = TypeVar("Pos", int, I64Array)


class SwaType(IntEnum):
    """How a layer limits the positions it attends to."""

    NONE = 0
    STANDARD = 1
    CHUNKED = 2
    SYMMETRIC = 3


@dataclass(frozen=True)
class Window:
    """A sliding window of `n_swa` tokens, the query's own position included.

    Raises
    ------
    ParamError
        If a window type is given without a positive `n_swa`.
    """

    n_swa: int = 0
    type: SwaType = SwaType.NONE

    def __post_init__(self) -> None:
        if self.type is not SwaType.NONE and self.n_swa < 1:
            raise ParamError(f"n_swa = {self.n_swa}: a {self.type.name} window needs at least 1 token")

    @property
    def kind(self) -> str:
        """What a layer with this window is called: "full" without one, else "standard", "chunked" or "symmetric"."""
        return "full" if self.type is SwaType.NONE else self.type.name.lower()

    def masked(self, p0: ArrayLike, p1: ArrayLike) -> BoolArray:
        """Tell which keys at `p0` the window hides from queries at `p1`.

        Positions are >= 0; the two arguments broadcast.
        """
        p0, p1 = np.asarray(p0), np.asarray(p1)
        match self.type:
            case SwaType.STANDARD:
                return np.asarray(p1 - p0 >= self.n_swa)
            case SwaType.CHUNKED:
                return np.asarray(p0 < p1 // self.n_swa * self.n_swa)
            case SwaType.SYMMETRIC:
                return np.asarray(abs(p1 - p0) > self.n_swa // 2)
            case _:
                return np.zeros(np.broadcast_shapes(p0.shape, p1.shape), np.bool_)

    def span(self, p1: Pos) -> tuple[Pos | int, Pos | int]:
        """Return the first and the last position that the window lets a query at `p1` see.

        The same rule as `masked`: every kind of window shows one run of positions. The ends may lie
        outside the valid positions.
        """
        match self.type:
            case SwaType.STANDARD:
                return p1 - self.n_swa + 1, POS_INF
            case SwaType.CHUNKED:
                return p1 // self.n_swa * self.n_swa, POS_INF
            case SwaType.SYMMETRIC:
                return p1 - self.n_swa // 2, p1 + self.n_swa // 2
            case _:
                return 0, POS_INF

    def hides_from(self, p0: Pos) -> Pos | int:
        """Return the first position behind `p0` where a query no longer sees it, nor does any after it."""
        match self.type:
            case SwaType.STANDARD:
                return p0 + self.n_swa
            case SwaType.CHUNKED:
                return (p0 // self.n_swa + 1) * self.n_swa
            case SwaType.SYMMETRIC:
                return p0 + self.n_swa // 2 + 1
            case _:
                return POS_INF


NO_WINDOW = Window()
"""Hides nothing."""
