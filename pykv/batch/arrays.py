"""Turns what a caller hands over into the arrays that batches are made of.

Always copies, so a batch stays as it was when the caller's list or array changes later. Never rounds, wraps
or guesses: a bool, a float, a NaN or a number beyond int32 is a `BatchError` that names the argument.
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from pykv.errors import BatchError
from pykv.typing import AnyArray, F32Array, I32Array, I64Array

INT32 = np.iinfo(np.int32)

A = TypeVar("A", bound=AnyArray)


def frozen(array: A) -> A:
    """Make an array read-only and return it."""
    array.setflags(write=False)
    return array


def ends(values: I32Array | I64Array) -> tuple[int, int]:
    """Return the smallest and the largest of at least one value."""
    if values.size == 1:  # the decode path: a reduction costs ten times an item
        only = values.item()
        return only, only
    return int(values.min()), int(values.max())


def integer(name: str, value: object) -> int:
    """Return `value` as an int; a bool, a float or anything else that is no integer raises `BatchError`."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        raise BatchError(f"{name} must be an integer, got the bool {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BatchError(f"{name} must be an integer, got {value!r}") from None


def int32_array(name: str, values: ArrayLike) -> I32Array:
    """Copy integers of any shape into a read-only int32 array."""
    if isinstance(values, (list, tuple)) and set(map(type, values)) == {int}:
        try:
            return frozen(np.array(values, np.int32))
        except OverflowError:
            pass  # the long way below finds the value to name
    array = _any_array(name, values)
    if array.size == 0:
        return frozen(np.zeros(array.shape, np.int32))
    if array.dtype.kind not in "iu":
        raise BatchError(f"{name} must be integers that fit int32, got {_described(array)}")
    if array.dtype != np.int32:
        _check_int32(name, array)
    return frozen(array.astype(np.int32, copy=False))


def float32_array(name: str, values: ArrayLike) -> F32Array:
    """Copy finite numbers of any shape into a read-only float32 array.

    note: a NaN or an infinity is refused: once stored, it spoils every later row that attends to its cell.
    """
    array = _any_array(name, values)
    if array.size and array.dtype.kind not in "fiu":
        raise BatchError(f"{name} must be real numbers, got {_described(array)}")
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, and is refused below
        rows = array.astype(np.float32, copy=False)
    if not np.isfinite(rows).all():
        raise BatchError(f"{name} must be finite in float32, got a NaN, an infinity or a number beyond its range")
    return frozen(rows)


def _any_array(name: str, values: ArrayLike) -> AnyArray:
    if isinstance(values, (list, tuple)) and _holds_bool(values):
        raise BatchError(f"{name} must be numbers, got a bool among them")
    try:
        return np.array(values, order="C")
    except (ValueError, TypeError, OverflowError) as error:
        raise BatchError(f"{name} must be a rectangular array of numbers: {error}") from None


def _holds_bool(values: list[Any] | tuple[Any, ...]) -> bool:
    # numpy would quietly read [True, 2] as integers
    kinds = set(map(type, values))
    if bool in kinds or np.bool_ in kinds:
        return True
    nested = list in kinds or tuple in kinds
    return nested and any(_holds_bool(row) for row in values if isinstance(row, (list, tuple)))


def _check_int32(name: str, array: AnyArray) -> None:
    low, high = ends(array)
    if low < INT32.min or high > INT32.max:
        culprit = low if low < INT32.min else high
        raise BatchError(f"{name} must fit int32 [{INT32.min}, {INT32.max}], got {culprit}")


def _described(array: AnyArray) -> str:
    return f"{array.dtype} (first value {array.flat[0]!r})"
