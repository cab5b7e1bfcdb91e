"""Values on their way between two processes: what `marshal` writes, and the few kinds of objects that pykv passes.

``marshal`` is the fastest encoding that Python has; it knows builtin types alone. All else becomes a tuple that begins
with an ellipsis and a tag. Classes are taken from pykv only, so that a reply can make no other object.

    tag        stands for
    "array"    a numpy array; a large one lies outside the message
    "scalar"   a number of numpy's
    "record"   a dataclass or a named tuple of pykv's, field by field, without the checks of its constructor
    "enum"     a member of an enumeration of pykv's
    "map"      a read-only mapping
    "path"     a path object
    "range"    a range
    "ref"      an object that stays in the other process
    "else"     anything else: only what it looks like, so that the other side refuses it in the usual words
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pykv.typing import AnyArray, as_int

INLINE = 2**15
"""Bytes of the largest array that travels inside a message."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


@dataclass(frozen=True)
class Ref:
    """An object that stays in the process of the model."""

    number: int


class Remote:
    """A stand-in for an object in the process of the model, which gets that object where this one is passed.

    Attributes
    ----------
    ref : the object.
    home : what asks that process; it knows the objects of no other one.
    """

    ref: Ref
    home: object


class Elsewhere:
    """What something looks like that cannot leave its process. Of no use, and of no type that is asked for."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Encoder:
    """Turns values into what `marshal` writes.

    Attributes
    ----------
    large : the arrays that are to be sent beside the message, in order; bytes that lie together.
    """

    def __init__(self, home: object = None) -> None:
        self.large: list[AnyArray] = []
        self._home = home

    def encode(self, value: Any) -> Any:
        """Return a value without objects; never fails, see "else"."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple and not (value and value[0] is Ellipsis):
            return tuple([each if type(each) in _PLAIN else self.encode(each) for each in value])
        if kind is list:
            return [self.encode(each) for each in value]
        if kind is dict:
            return {self.encode(key): self.encode(each) for key, each in value.items()}
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return (Ellipsis, "ref", value.number)
        if isinstance(value, Remote) and value.home is self._home:
            return (Ellipsis, "ref", value.ref.number)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return self._array(value)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return (Ellipsis, "scalar", value.dtype.str, value.tobytes())
        if isinstance(value, Enum) and _is_ours(type(value)):
            return (Ellipsis, "enum", *_name(type(value)), value.name)
        if is_record(value):
            return (Ellipsis, "record", *_name(type(value)), self.encode(_fields(value)))
        if isinstance(value, (bytearray, memoryview)):
            return self._buffer(value)
        if isinstance(value, range):
            return (Ellipsis, "range", value.start, value.stop, value.step)
        if isinstance(value, os.PathLike):
            return (Ellipsis, "path", os.fsdecode(value))
        if isinstance(value, MappingProxyType):
            return (Ellipsis, "map", self.encode(dict(value)))
        if isinstance(value, Mapping):
            return {self.encode(key): self.encode(each) for key, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple)):
            return [self.encode(each) for each in value]
        return self._other(value)

    def _other(self, value: Any) -> Any:
        """Return an object of a class of the caller's own as what it is based on, if that is anything known."""
        kinds: tuple[Callable[[Any], Any], ...] = (int, float, str, bytes)
        for kind in kinds:
            if isinstance(value, kind):  # type: ignore[arg-type]
                return kind(value)
        number = as_int(value)
        return (Ellipsis, "else", type(value).__name__, shown(value)) if number is None else number

    def _array(self, value: AnyArray) -> Any:
        data = np.ascontiguousarray(value)
        if data.nbytes <= INLINE:
            return (Ellipsis, "array", value.dtype.str, value.shape, value.flags.writeable, data.tobytes())
        self.large.append(data.reshape(-1).view(np.uint8))
        return (Ellipsis, "array", value.dtype.str, value.shape, value.flags.writeable, len(self.large) - 1)

    def _buffer(self, value: bytearray | memoryview) -> Any:
        """Return bytes of any length as an array of them; what does not lie together as what it looks like."""
        try:
            data = np.frombuffer(value, np.uint8)
        except (ValueError, BufferError):
            return (Ellipsis, "else", type(value).__name__, shown(value))
        return self._array(data)


class Decoder:
    """Turns what an `Encoder` made back into values."""

    def __init__(self, large: Sequence[AnyArray], resolve: Callable[[Ref], Any] = lambda ref: ref) -> None:
        self._large, self._resolve = large, resolve

    def decode(self, value: Any) -> Any:
        """Return the value."""
        kind = type(value)
        if kind is tuple:
            if value and value[0] is Ellipsis:
                return getattr(self, f"_{value[1]}")(*value[2:])
            return tuple([each if type(each) in _PLAIN else self.decode(each) for each in value])
        if kind is list:
            return [self.decode(each) for each in value]
        if kind is dict:
            return {self.decode(key): self.decode(each) for key, each in value.items()}
        return value

    def _ref(self, number: int) -> Any:
        return self._resolve(Ref(number))

    def _array(self, dtype: str, shape: tuple[int, ...], writeable: bool, data: bytes | int) -> AnyArray:
        if isinstance(data, int):
            array: AnyArray = self._large[data].view(np.dtype(dtype)).reshape(shape)
        else:
            array = np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)
        array.flags.writeable = writeable
        return array

    def _scalar(self, dtype: str, data: bytes) -> Any:
        return np.frombuffer(data, np.dtype(dtype))[0]

    def _enum(self, module: str, name: str, member: str) -> Any:
        return find_class(module, name)[member]  # type: ignore[index]

    def _record(self, module: str, name: str, values: dict[str, Any]) -> Any:
        cls, values = find_class(module, name), self.decode(values)
        if issubclass(cls, tuple):
            return cls(**values)
        made = object.__new__(cls)
        for field, each in values.items():
            object.__setattr__(made, field, each)
        return made

    def _map(self, values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
        return MappingProxyType(self.decode(values))

    def _range(self, *ends: int) -> range:
        return range(*ends)

    def _path(self, text: str) -> Path:
        return Path(text)

    def _else(self, kind: str, text: str) -> Elsewhere:
        made: Elsewhere = type(kind, (Elsewhere,), {})(text)
        return made


def is_record(value: object) -> bool:
    """Return whether a value is a dataclass or named tuple of pykv's."""
    kind = type(value)
    return _is_ours(kind) and (is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")))


def find_class(module: str, name: str) -> type:
    """Return a class of pykv's by where it is defined; raises `LookupError` for any other."""
    if module.partition(".")[0] != "pykv":
        raise LookupError(f"{module}.{name} is none of pykv's classes")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise LookupError(f"{module}.{name} is no class")
    return found


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "pykv"


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        return value._asdict()  # type: ignore[attr-defined, no-any-return]
    return {field.name: getattr(value, field.name) for field in fields(value)}


def shown(value: object) -> str:
    """Return what an object looks like, also where its own way of showing itself fails."""
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)
