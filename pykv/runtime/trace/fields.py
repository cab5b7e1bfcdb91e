"""Fields of a JSON object, each checked as it is taken, so that what is wrong with a trace is told by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pykv.cells.arguments import shown

T = TypeVar("T")

_KINDS = {bool: "true or false", int: "a whole number", str: "a text", list: "a list", dict: "an object"}


def taken(record: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a field.

    Raises
    ------
    ValueError : it is missing, or of another kind.
    """
    if name not in record:
        raise ValueError(f"{name!r} is missing")
    return of_kind(name, record[name], kind)


def of_kind(name: str, value: Any, kind: type[T]) -> T:
    """Return the value of a field.

    Raises
    ------
    ValueError : it is of another kind.
    """
    if type(value) is not kind:
        raise ValueError(f"{name}={shown(value)} must be {_KINDS[kind]}")
    return value


def ints(name: str, values: Any, n: int | None = None) -> tuple[int, ...]:
    """Return the whole numbers of a list, of `n` if given.

    Raises
    ------
    ValueError : it is none, or holds something else.
    """
    is_whole = type(values) is list and all(type(value) is int and -(2**31) <= value < 2**31 for value in values)
    if not is_whole or (n is not None and len(values) != n):
        many = "" if n is None else f"{n} "
        raise ValueError(f"{name}={shown(values)} must be a list of {many}whole numbers that an int32 holds")
    return tuple(values)


def by_sequence(record: Mapping[str, Any], name: str) -> Iterator[tuple[int, Any]]:
    """Yield the sequences that a field names, and what it has for each.

    Raises
    ------
    ValueError : it is no object, or names something else.
    """
    for seq, value in taken(record, name, dict).items():
        if not (seq.isascii() and seq.isdigit()):
            raise ValueError(f"{name}: {shown(seq)} is no sequence")
        yield int(seq), value
