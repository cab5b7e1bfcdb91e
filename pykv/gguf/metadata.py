"""Typed metadata of a GGUF file.

Types are checked before values are read: ggml's reader ends the process on a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import GGUFError
from pykv.typing import AnyArray

if TYPE_CHECKING:
    from pykv.gguf.reader import GGUFFile

_T = TypeVar("_T", int, float, bool, str)

_NUMBERS: dict[int, np.dtype[Any]] = {
    lib.GGUF_TYPE_UINT8: np.dtype("<u1"),
    lib.GGUF_TYPE_INT8: np.dtype("<i1"),
    lib.GGUF_TYPE_UINT16: np.dtype("<u2"),
    lib.GGUF_TYPE_INT16: np.dtype("<i2"),
    lib.GGUF_TYPE_UINT32: np.dtype("<u4"),
    lib.GGUF_TYPE_INT32: np.dtype("<i4"),
    lib.GGUF_TYPE_UINT64: np.dtype("<u8"),
    lib.GGUF_TYPE_INT64: np.dtype("<i8"),
    lib.GGUF_TYPE_FLOAT32: np.dtype("<f4"),
    lib.GGUF_TYPE_FLOAT64: np.dtype("<f8"),
    lib.GGUF_TYPE_BOOL: np.dtype("?"),
}

MetadataValue = str | int | float | bool | list[str] | AnyArray


def utf8_name(path: Path, what: str, text: Any) -> str:
    """Return the name of a key or tensor, which must be UTF-8, so that two names never become one."""
    raw = bytes(ffi.string(text))
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise GGUFError(f"{path}: the name of a {what} is not UTF-8: {raw!r}") from error


class Metadata(Mapping[str, MetadataValue]):
    """The key-value part of a GGUF file; values are converted when first asked for.

    Strings, numbers and bools come as Python's own, arrays of strings as lists, arrays of numbers as numpy arrays.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        n = lib.gguf_get_n_kv(file.ptr)
        self._ids = {utf8_name(file.path, "key", lib.gguf_get_key(file.ptr, i)): i for i in range(n)}
        if len(self._ids) < n:  # ggml tells keys apart behind a zero byte
            raise GGUFError(f"{file.path}: two keys have the same name")
        self._values: dict[str, MetadataValue] = {}

    def __getitem__(self, key: str) -> MetadataValue:
        if key not in self._values:
            self._values[key] = self._read(self._ids[key])
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, key: object) -> bool:
        return key in self._ids

    @overload
    def typed(self, key: str, kind: type[_T]) -> _T: ...
    @overload
    def typed(self, key: str, kind: type[_T], default: _T) -> _T: ...
    def typed(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return a scalar of the given kind; an int is also taken as a float.

        Raises
        ------
        GGUFError : the key is missing and there is no default, or its value is of another kind.
        """
        if key not in self._ids:
            if default is None:
                raise GGUFError(f"{self._file.path}: the key {key!r} is missing")
            return default
        value = self[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            found = type(value).__name__
            raise GGUFError(f"{self._file.path}: the key {key!r} holds {found}, expected {kind.__name__}")
        return value

    def _read(self, key_id: int) -> MetadataValue:
        ptr = self._file.ptr
        kind = lib.gguf_get_kv_type(ptr, key_id)
        if kind == lib.GGUF_TYPE_STRING:
            return str(ffi.string(lib.gguf_get_val_str(ptr, key_id)).decode(errors="replace"))
        if kind == lib.GGUF_TYPE_ARRAY:
            return self._read_array(key_id)
        dtype = _NUMBERS[kind]
        raw = ffi.buffer(lib.gguf_get_val_data(ptr, key_id), dtype.itemsize)
        value: MetadataValue = np.frombuffer(raw, dtype)[0].item()
        return value

    def _read_array(self, key_id: int) -> list[str] | AnyArray:
        ptr = self._file.ptr
        kind, n = lib.gguf_get_arr_type(ptr, key_id), lib.gguf_get_arr_n(ptr, key_id)
        if kind == lib.GGUF_TYPE_STRING:
            return _read_strings(ptr, key_id, n)
        if kind not in _NUMBERS:
            raise GGUFError(f"{self._file.path}: arrays of arrays are not supported")
        dtype = _NUMBERS[kind]
        if n == 0:
            return np.empty(0, dtype)
        return np.frombuffer(ffi.buffer(lib.gguf_get_arr_data(ptr, key_id), n * dtype.itemsize), dtype).copy()


def _read_strings(ptr: Any, key_id: int, n: int) -> list[str]:
    """Fetch all strings with one call: a call a string would cost more than the parsing."""
    if n == 0:
        return []
    n_bytes = lib.pykv_gguf_join_strings(ptr, key_id, ffi.NULL, ffi.NULL, -1)
    text = ffi.new("char[]", max(1, n_bytes))
    ends = np.empty(n, np.int64)
    lib.pykv_gguf_join_strings(ptr, key_id, text, ffi.from_buffer("int64_t[]", ends), n_bytes)
    joined = bytes(ffi.buffer(text, n_bytes))
    bounds = ends.tolist()
    starts = [0, *bounds[:-1]]
    return [joined[a:b].decode(errors="replace") for a, b in zip(starts, bounds, strict=True)]
