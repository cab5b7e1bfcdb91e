"""Keys: the metadata of one model, read key by key and checked."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from pykv.errors import GGUFError
from pykv.gguf import GGUFFile, Metadata

MAX_STRETCH = 2.0**31
"""Positions lie below it, so a factor beyond it, or beyond its inverse, leaves nothing of them."""

FLOAT32_MAX, FLOAT32_MIN = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_normal)
"""The largest number and the smallest normal one of the type that ggml computes with."""

_T = TypeVar("_T", int, float)


class Keys:
    """Typed reading of a model's keys, those below ``<architecture>.``, with range checks.

    Every method raises `GGUFError`, naming the key, its value and the limit.

    Attributes
    ----------
    path : the file.
    meta : all of its metadata.
    tensors : its tensors by name.
    architecture : as the file names it.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.meta: Metadata = file.metadata
        self.architecture = self.meta.typed("general.architecture", str)
        self.tensors = file.tensors

    def key(self, name: str) -> str:
        """Return the full name of a key."""
        return f"{self.architecture}.{name}"

    def number(self, name: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return a number; the key must be there if there is no default."""
        if default is None:
            return self.meta.typed(self.key(name), kind)
        return self.meta.typed(self.key(name), kind, default)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from `least` on."""
        value = self.number(name, int, default)
        if not least <= value < 2**31:
            raise self.refusal(name, value, f"at least {least} and at most {2**31 - 1}")
        return value

    def finite(self, name: str, default: float) -> float:
        """Return a number that float32 holds."""
        value = self.number(name, float, default)
        if not abs(value) <= FLOAT32_MAX:  # false for a NaN too
            raise self.refusal(name, value, "a finite number in float32")
        return value

    def unsigned(self, name: str, default: float) -> float:
        """Return a number that is not negative."""
        value = self.finite(name, default)
        if value < 0:
            raise self.refusal(name, value, "a number, not negative")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a number above 0, or 0 where that is the default and means "not given"."""
        value = self.number(name, float, default)
        if not (FLOAT32_MIN <= value <= FLOAT32_MAX or value == default == 0.0):
            raise self.refusal(name, value, "a positive number, neither tiny nor infinite in float32")
        return value

    def stretch(self, name: str) -> float:
        """Return a factor on positions, or 0 for "not given"."""
        value = self.positive(name, 0.0)
        if value and not 1 / MAX_STRETCH <= value <= MAX_STRETCH:
            raise self.refusal(name, value, "a positive number in 2^-31..2^31")
        return value

    def refusal(self, name: str, value: object, limits: str) -> GGUFError:
        """Return what to raise about a value."""
        return GGUFError(f"{self.path}: {self.key(name)}={value} must be {limits}")

    def flag(self, name: str, default: bool) -> bool:
        """Return whether something is so."""
        return self.meta.typed(self.key(name), bool, default)

    def per_layer(self, name: str, n_layer: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return one number per layer; the file may give one for all, also 0."""
        key = self.key(name)
        if key not in self.meta and default is not None:
            return default
        value = self.meta[key] if key in self.meta else self.size(name)
        values = value.tolist() if isinstance(value, np.ndarray) else [self.size(name, least=0)] * n_layer
        if len(values) != n_layer or not all(isinstance(v, int) and v >= 0 for v in values):
            raise GGUFError(f"{self.path}: {key} must hold one count for each of the {n_layer} layers")
        return tuple(values)
