"""What a caller hands to a verb: integers of any type, numpy's too, but never rounded and never a bool; and bools."""

from __future__ import annotations

from pykv.errors import ParamError, SequenceError
from pykv.typing import as_bool, as_int


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return an argument as an int.

    Raises
    ------
    ParamError : it is no integer, or not one from `low` to `high`; give both or none.
    """
    number = as_int(value)
    if number is None or (low is not None and high is not None and not low <= number <= high):
        limits = "" if low is None else f" from {low} to {high}"
        raise ParamError(f"{name} = {shown(value)}: must be an integer{limits}")
    return number


def boolean(name: str, value: object) -> bool:
    """Return an argument as a bool.

    Raises
    ------
    ParamError : it is none.
    """
    flag = as_bool(value)
    if flag is None:
        raise ParamError(f"{name} = {shown(value)}: must be True or False")
    return flag


def sequence_id(name: str, value: object, n_ids: int) -> int:
    """Return an argument as one of the `n_ids` sequences of a cache.

    Raises
    ------
    SequenceError : it is no integer, or there is no such sequence.
    """
    number = as_int(value)
    if number is None or not 0 <= number < n_ids:
        what = f", an integer is needed, not {type(value).__name__}" if number is None else ""
        raise SequenceError(f"{name} = {shown(value)}: this cache holds sequences 0 to {n_ids - 1}{what}")
    return number


def shown(value: object) -> str:
    """Return a value as a message can hold it, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, or somebody's own class
        return f"some {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
