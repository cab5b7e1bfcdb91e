"""Read a GGUF file: typed metadata, tensor table, and the file mapped into memory.

Everything is checked before it is read: ggml's reader ends the process on a wrong type.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import GGUFError
from pykv.ggml.log_bridge import caught_errors
from pykv.ggml.owner import Owner
from pykv.ggml.types import DType
from pykv.typing import AnyArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)

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

_TYPE_NUMBERS = frozenset(int(dtype) for dtype in DType)

MetadataValue = str | int | float | bool | list[str] | AnyArray


def _name(path: Path, what: str, text: Any) -> str:
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
        names = (lib.gguf_get_key(file.ptr, i) for i in range(lib.gguf_get_n_kv(file.ptr)))
        self._ids = {_name(file.path, "key", name): i for i, name in enumerate(names)}
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


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table.

    Attributes
    ----------
    ne : elements per dim, four of them, first dim contiguous.
    offset, nbytes : where the data lies in the file, in bytes from its start.
    """

    name: str
    dtype: DType
    ne: tuple[int, int, int, int]
    offset: int
    nbytes: int


class GGUFFile(Owner):
    """An open GGUF file.

    Attributes
    ----------
    path : the file.
    metadata : its keys and values.
    tensors : its tensor table, by name, in file order.

    Raises
    ------
    GGUFError : no such file, not GGUF, damaged, or cut off; the message says which.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.nbytes = _check_head(self.path)
        params = ffi.new("struct gguf_init_params *", {"no_alloc": True, "ctx": ffi.NULL})
        with caught_errors() as lines:
            ptr = lib.gguf_init_from_file(os.fsencode(self.path), params[0])
        if ptr == ffi.NULL:
            why = lines[0].rpartition("gguf_init_from_reader: ")[2] if lines else "no reason given"
            raise GGUFError(f"{self.path}: the GGUF header is damaged or cut off: {why}")
        self._own(ptr, lib.gguf_free)
        try:
            self.metadata = Metadata(self)
            self.tensors = self._read_table()
        except GGUFError:
            self.close()
            raise

    @property
    def alignment(self) -> int:
        return int(lib.gguf_get_alignment(self.ptr))

    def map(self) -> mmap.mmap:
        """Map the file into memory, read-only, and ask the system to read ahead."""
        _ = self.ptr
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_WILLNEED"):
            mapped.madvise(mmap.MADV_WILLNEED)
        return mapped

    def _read_table(self) -> dict[str, TensorInfo]:
        table: dict[str, TensorInfo] = {}
        for i in range(lib.gguf_get_n_tensors(self.ptr)):
            info = self._read_row(i)
            if info.name in table:
                raise GGUFError(f"{self.path}: two tensors are named {info.name!r}")
            table[info.name] = info
        return table

    def _read_row(self, i: int) -> TensorInfo:
        ptr = self.ptr
        name = _name(self.path, "tensor", lib.gguf_get_tensor_name(ptr, i))
        number, ne = lib.gguf_get_tensor_type(ptr, i), tuple(ffi.unpack(lib.gguf_get_tensor_ne(ptr, i), 4))
        if number not in _TYPE_NUMBERS:
            raise GGUFError(f"{self.path}: tensor {name!r} is of the unknown type {number}")
        dtype = DType(number)
        # note: ggml multiplies in 64 bits, which the dims of a damaged file can overflow
        n_bytes = dtype.row_size(ne[0]) * prod(ne[1:])
        offset = int(lib.gguf_get_data_offset(ptr) + lib.gguf_get_tensor_offset(ptr, i))
        if offset + n_bytes > self.nbytes:
            raise GGUFError(
                f"{self.path}: cut off: tensor {name!r} {list(ne)} ends at byte {offset + n_bytes}, "
                f"the file at {self.nbytes}"
            )
        return TensorInfo(name, dtype, ne, offset, n_bytes)


def _check_head(path: Path) -> int:
    """Return the file's size after a look at its first bytes."""
    try:
        status, head = path.stat(), b""
        is_file = stat.S_ISREG(status.st_mode)  # opening a pipe would wait
        if is_file:
            with path.open("rb") as file:
                head = file.read(len(MAGIC) + 4)
    except OSError as error:
        raise GGUFError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:  # a path with a NUL in it
        raise GGUFError(f"{str(path)!r}: cannot be opened: {error}") from error
    if not is_file:
        raise GGUFError(f"{path}: not a file that can be mapped")
    if head[: len(MAGIC)] != MAGIC:
        raise GGUFError(f"{path}: not a GGUF file: it starts with {head[: len(MAGIC)]!r}, not {MAGIC!r}")
    version = int.from_bytes(head[len(MAGIC) :], "little")
    if version not in VERSIONS:
        swapped = int.from_bytes(head[len(MAGIC) :], "big") in VERSIONS
        what = "of the other byte order" if swapped else f"of version {version}"
        raise GGUFError(f"{path}: a GGUF file {what}; known are little-endian versions {VERSIONS}")
    return status.st_size
