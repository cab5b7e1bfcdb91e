"""Tensor: a ggml tensor with its owner, its shape read once, and checked access to its data."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import TensorError, UseAfterCloseError
from pykv.ggml.types import BY_NUMBER, to_float
from pykv.typing import AnyArray, F32Array

if TYPE_CHECKING:
    from pykv.ggml.arena import Arena
    from pykv.ggml.buffer import Buffer
    from pykv.ggml.row_index import RowIndex

_NAME_BYTES = int(lib.GGML_MAX_NAME) - 1


class Tensor:
    """A tensor `[ne0, ne1, ne2, ne3]`, first dim contiguous; shape and strides never change.

    Attributes
    ----------
    ne : elements per dim.
    nb : byte stride per dim.
    owner : what keeps the data's buffer alive; None for tensors that a scheduler allocates.
    base : the tensor whose memory this one shares, None if it has its own.
    is_node : whether it is computed.
    index : how many tensors its arena made before it.
    row_index : what it may name, if it names rows of other tensors.
    values_below : a bound of its values, whole numbers from 0, if the way that they are computed vouches for it.
    """

    __slots__ = (
        *("arena", "base", "dtype", "epoch", "index", "is_node", "nb", "ne"),
        *("owner", "raw", "row_index", "values_below"),
    )

    def __init__(self, raw: Any, arena: Arena, view_of: Tensor | None = None, *, is_node: bool = False) -> None:
        self.raw, self.arena = raw, arena
        self.dtype = BY_NUMBER[raw.type]
        self.ne: tuple[int, int, int, int] = tuple(ffi.unpack(raw.ne, 4))
        self.nb: tuple[int, int, int, int] = tuple(ffi.unpack(raw.nb, 4))
        self.owner: Buffer | None = None
        self.base: Tensor | None = None if view_of is None else view_of.base or view_of
        self.is_node, self.index, self.epoch = is_node, arena.n_used - 1, arena.epoch
        self.row_index: RowIndex | None = None
        self.values_below: int | None = None

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype.label}, {list(self.ne)})"

    @property
    def name(self) -> str:
        return str(ffi.string(lib.ggml_get_name(self.ptr)).decode(errors="replace"))

    @property
    def ptr(self) -> Any:
        """The C pointer; raises `UseAfterCloseError` when the arena is closed or was reset."""
        _ = self.arena.ptr
        if self.epoch != self.arena.epoch:
            raise UseAfterCloseError("the tensor is gone: its arena was reset")
        return self.raw

    @property
    def nbytes(self) -> int:
        """Bytes from the first to behind the last element (more than the elements', in a strided view)."""
        return int(lib.ggml_nbytes(self.ptr))

    @property
    def n_elements(self) -> int:
        return prod(self.ne)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in ne order."""
        expect = self.dtype.type_size
        if self.nb[0] != expect:
            return False
        expect = expect * (self.ne[0] // self.dtype.block_size)
        for n, stride in zip(self.ne[1:], self.nb[1:], strict=True):
            if n != 1 and stride != expect:
                return False
            expect *= n
        return True

    @property
    def has_dense_rows(self) -> bool:
        """Whether the elements of a row lie one after the other."""
        return self.nb[0] == self.dtype.type_size

    @property
    def is_allocated(self) -> bool:
        """Whether it has been given memory, which may be closed by now; see `check_data`."""
        return bool(self.ptr.data != ffi.NULL)

    @property
    def is_read_only(self) -> bool:
        """Whether the data lies in memory that must not be written, such as a mapped file."""
        owner = (self.base or self).owner
        return owner is not None and owner.is_read_only

    def check_data(self) -> None:
        """Raise unless the data can be reached.

        Raises
        ------
        UseAfterCloseError : arena, buffer or scheduler are closed.
        TensorError : it has no data yet, or the scheduler has given its memory to another graph.
        """
        _ = self.ptr
        home = self.base or self
        if home is not self:
            _ = home.ptr
        home.arena.check_home(home)
        if self.raw.data == ffi.NULL:
            raise TensorError(f"{self!r} has no data yet")

    def check_layout(self) -> None:
        """Raise unless the elements lie as the type says.

        Raises
        ------
        TensorError : it is repacked.
        """
        # note: ggml has no way back: it calls what is not there, or takes the values for others
        if self.arena.is_repacked:
            raise TensorError(f"{self!r} is repacked: it can be multiplied with, but not read, viewed or looked up in")

    def named(self, name: str) -> Tensor:
        """Set the name that logs and debuggers show; returns self."""
        lib.ggml_set_name(self.ptr, name.encode()[:_NAME_BYTES])
        return self

    def as_input(self) -> Tensor:
        """Mark as filled by the caller before each compute; returns self."""
        lib.ggml_set_input(self.ptr)
        return self

    def as_output(self) -> Tensor:
        """Mark as read by the caller after compute; returns self."""
        lib.ggml_set_output(self.ptr)
        return self

    def set(self, array: AnyArray, offset: int = 0) -> None:
        """Write the bytes of a C-contiguous array at a byte offset. Mutates the tensor's data.

        Memory that repacks lays them out anew, and takes whole tensors only.

        Raises
        ------
        TensorError : no data yet, the memory is read-only, the array is not contiguous, it does not fit, it names a
            row that does not exist, or it is a part of what is repacked.
        """
        self._check_span(offset, array.nbytes, "array")
        if self.arena.is_repacked:
            self._check_repacking(array.nbytes)
        self._check_writable()
        if not array.flags.c_contiguous:
            raise TensorError("array is not C-contiguous")
        home = self.base or self
        if home.row_index is not None:
            if (offset | array.nbytes) % home.dtype.type_size:
                raise TensorError(f"{self!r} names rows; they are written whole")
            home.row_index.check(np.frombuffer(array, home.dtype.numpy_dtype))
        lib.ggml_backend_tensor_set(self.raw, ffi.from_buffer(array), offset, array.nbytes)

    def get_into(self, array: AnyArray, offset: int = 0) -> None:
        """Read bytes from a byte offset into a writable C-contiguous array, as many as it holds."""
        self.check_layout()
        self._check_span(offset, array.nbytes, "array")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise TensorError("array must be C-contiguous and writable")
        target = ffi.from_buffer(array, require_writable=True)
        lib.ggml_backend_tensor_get(self.raw, target, offset, array.nbytes)

    def fill(self, value: int = 0) -> None:
        """Set every byte of the data to `value`, 0 to 255."""
        if not 0 <= value <= 255:
            raise TensorError(f"value={value} is no byte")
        # note: not every backend has ggml's own memset
        self.set(np.full(self.nbytes, value, np.uint8))

    def raw_bytes(self) -> AnyArray:
        """Return a copy of the data as uint8 of shape (nbytes,)."""
        out = np.empty(self.nbytes, np.uint8)
        self.get_into(out)
        return out

    def numpy(self) -> AnyArray:
        """Return a copy of the data, shape `ne` reversed.

        Quantised and bf16 tensors come as raw blocks, uint8 of shape (..., row bytes); see `to_f32`.

        Raises
        ------
        TensorError : no data yet, or a view that is not contiguous.
        """
        if not self.is_contiguous:
            raise TensorError(f"{self!r} is a strided view; copy it with ops.cont in a graph first")
        shape = tuple(reversed(self.ne))
        kind = self.dtype.numpy_dtype
        if kind is None:
            return self.raw_bytes().reshape(*shape[:-1], self.dtype.row_size(self.ne[0]))
        out = np.empty(shape, kind)
        self.get_into(out)
        return out

    def to_f32(self) -> F32Array:
        """Return a copy of the data converted to float32, shape `ne` reversed."""
        if not self.is_contiguous:
            raise TensorError(f"{self!r} is a strided view; copy it with ops.cont in a graph first")
        return to_float(self.dtype, self.raw_bytes(), self.n_elements).reshape(tuple(reversed(self.ne)))

    def _check_span(self, offset: int, n_bytes: int, what: str) -> None:
        self.check_data()
        if offset < 0 or offset + n_bytes > lib.ggml_nbytes(self.raw):
            raise TensorError(
                f"{what} of {n_bytes} bytes at offset {offset} leaves {self!r}, which has {self.nbytes} bytes"
            )

    def _check_repacking(self, n_bytes: int) -> None:
        if self.raw.extra == ffi.NULL:
            raise TensorError(f"{self!r} cannot be repacked; see `can_repack`")
        if n_bytes != self.nbytes:
            raise TensorError(f"array of {n_bytes} bytes: {self!r} is repacked from all its {self.nbytes} bytes")

    def _check_writable(self) -> None:
        if self.is_read_only:
            raise TensorError(f"{self!r} lies in read-only memory")
