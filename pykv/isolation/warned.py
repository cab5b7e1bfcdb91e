"""A warning of another process, given once more where the program called."""

from __future__ import annotations

import builtins
import sys
import warnings
from typing import TYPE_CHECKING

from pykv.isolation.codec import find_class

if TYPE_CHECKING:
    from types import FrameType


def warn_again(module: str, name: str, message: str) -> None:
    """Warn of the line that called into pykv; raises where the program has made such warnings errors."""
    kind = getattr(builtins, name, None) if module == "builtins" else find_class(module, name)
    category = kind if isinstance(kind, type) and issubclass(kind, Warning) else RuntimeWarning
    level, frame = 1, sys._getframe()
    above: FrameType | None = frame
    while above is not None and str(above.f_globals.get("__name__")).partition(".")[0] in ("pykv", "contextlib"):
        level, above = level + 1, above.f_back
    warnings.warn(message, category, stacklevel=level)
