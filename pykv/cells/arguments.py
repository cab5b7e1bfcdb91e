"""Integers that a caller hands to a verb: of any type, numpy's too, but never rounded and never a bool."""

from __future__ import annotations

from pykv.errors import ParamError, SequenceError
from pykv.typing import as_int


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return an argument as an int.

    Raises
    ------
    ParamError : it is no integer, or not one from `low` to `high`; give both or none.
    """
    number = as_int(value)
    if number is None or (low is not None and high is not None and not low <= number <= high):
        limits = "" if low is None else f" from {low} to {high}"
        raise ParamError(f"{name} = {value!r}: must be an integer{limits}")
    return number


def sequence_id(name: str, value: object, n_ids: int) -> int:
    """Return an argument as one of the `n_ids` sequences of a cache.

    Raises
    ------
    SequenceError : it is no integer, or there is no such sequence.
    """
    number = as_int(value)
    if number is None or not 0 <= number < n_ids:
        raise SequenceError(f"{name} = {value!r}: this cache holds sequences 0 to {n_ids - 1}")
    return number
