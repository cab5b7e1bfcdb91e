"""Warnings that name the line of the program that called into pykv."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


def warn_caller(message: str, kind: type[Warning] = RuntimeWarning) -> None:
    """Warn of the line that called into pykv, however deep in it this is."""
    level, frame = 1, sys._getframe()
    above: FrameType | None = frame
    while above is not None and str(above.f_globals.get("__name__")).partition(".")[0] == "pykv":
        level, above = level + 1, above.f_back
    warnings.warn(message, kind, stacklevel=level)
