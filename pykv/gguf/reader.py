"""Read a GGUF file: typed metadata, tensor table, and the file mapped into memory.

ggml's own reader does the parsing; what it lets pass is checked against the size of the file.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pykv._native import ffi, lib
from pykv.errors import GGUFError, ParamError
from pykv.ggml.log_bridge import caught_errors
from pykv.ggml.owner import Owner
from pykv.ggml.types import DType
from pykv.gguf.metadata import Metadata, utf8_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_TYPE_NUMBERS = frozenset(int(dtype) for dtype in DType)


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
    ParamError : `path` is no path.
    """

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        self.path = _as_path(path)
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
        name = utf8_name(self.path, "tensor", lib.gguf_get_tensor_name(ptr, i))
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


def _as_path(path: object) -> Path:
    try:
        return Path(os.fsdecode(path))  # type: ignore[arg-type]
    except TypeError:
        raise ParamError(f"path={path!r} must be the path of a file") from None


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
    if len(head) < len(MAGIC) + 4:
        raise GGUFError(f"{path}: cut off: it ends at byte {len(head)}, before its version does")
    version = int.from_bytes(head[len(MAGIC) :], "little")
    if version not in VERSIONS:
        swapped = int.from_bytes(head[len(MAGIC) :], "big") in VERSIONS
        what = "of the other byte order" if swapped else f"of version {version}"
        raise GGUFError(f"{path}: a GGUF file {what}; known are little-endian versions {VERSIONS}")
    return status.st_size
