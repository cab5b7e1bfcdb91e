"""Typed reading of a file's tokenizer keys: a value has the type its key promises, or it is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pykv.errors import TokenizerError
from pykv.typing import AnyArray

Metadata = Mapping[str, object]
"""A file's key-value pairs: str, int, float, bool, list of str, or numpy array for the other arrays."""


def string(meta: Metadata, key: str) -> str | None:
    """Return a string, None where the key is missing."""
    value = meta.get(key)
    if value is not None and not isinstance(value, str):
        raise _mistyped(key, value, "a string")
    return value


def flag(meta: Metadata, key: str, default: bool) -> bool:
    """Return a bool, the default where the key is missing."""
    value = meta.get(key, default)
    if not isinstance(value, (bool, np.bool_)):
        raise _mistyped(key, value, "a bool")
    return bool(value)


def integer(meta: Metadata, key: str) -> int | None:
    """Return an integer, None where the key is missing."""
    value = meta.get(key)
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise _mistyped(key, value, "an integer")
    return int(value)


def strings(meta: Metadata, key: str) -> list[str]:
    """Return a list of strings; the key must be there."""
    value = meta.get(key)
    if value is None:
        raise TokenizerError(f"the metadata lacks {key!r}")
    # note: one look at each end, not at 262k items; a wrong one inside fails where it is used
    if not isinstance(value, list) or not all(isinstance(item, str) for item in (*value[:1], *value[-1:])):
        raise _mistyped(key, value, "a list of strings")
    return value


def numbers(meta: Metadata, key: str, n: int) -> AnyArray | None:
    """Return the first `n` of an array of numbers, None where the key is missing."""
    value: Any = meta.get(key)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise _mistyped(key, value, "an array of numbers")
    if len(array) < n:
        raise TokenizerError(f"{key!r} has {len(array)} entries, fewer than the {n} tokens")
    return array[:n]


def _mistyped(key: str, value: object, wanted: str) -> TokenizerError:
    return TokenizerError(f"{key!r} must be {wanted}, not {type(value).__name__}")
