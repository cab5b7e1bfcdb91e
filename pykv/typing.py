"""Names that several layers share: array aliases, limits of the format, and the one protocol that batches need."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_SEQ = 256
"""Largest number of sequences that any memory can tell apart (llama.cpp: LLAMA_MAX_SEQ)."""

POS_INF = 2**31 - 1
"""The open end of a position range."""

NO_POS = -1
"""Position of an empty cell, and the last position of an empty sequence."""

BoolArray = NDArray[np.bool_]
I32Array = NDArray[np.int32]
I64Array = NDArray[np.int64]
F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]
AnyArray = NDArray[Any]


def as_int(value: object) -> int | None:
    """Return an integer, numpy's too, as an int; None for a bool and for all that is no integer."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_bool(value: object) -> bool | None:
    """Return a bool, Python's or numpy's, as Python's; None for whatever else is none."""
    return bool(value) if isinstance(value, (bool, np.bool_)) else None


def as_number(value: object) -> float | None:
    """Return a real number of any type, numpy's too, as a float; None for a bool, a NaN and whatever else is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


class PositionSource(Protocol):
    """What a batch asks a memory: where each sequence begins and ends."""

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest stored position of a sequence, -1 if it is empty."""
        ...

    def pos_max(self, seq_id: int) -> int:
        """Return the largest stored position of a sequence, -1 if it is empty."""
        ...
