"""Buffers: backend memory, its types, and the tensors placed in it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import AllocError, ConcurrentUseError, TensorError
from pykv.ggml.owner import Owner
from pykv.typing import AnyArray

if TYPE_CHECKING:
    from pykv.ggml.arena import Arena
    from pykv.ggml.device import Device
    from pykv.ggml.tensor import Tensor


REPACKING = "CPU_REPACK"
"""The type of memory in which matrices lie as the CPU's products like them best."""

PLACE_ALIGNMENT = 4
"""Bytes at whose multiples tensors may be placed: what the kernels read at once at least."""


@dataclass(frozen=True)
class BufferType:
    """A kind of backend memory; equal when it is the same C object.

    Attributes
    ----------
    is_imagined : whether buffers of it have a place and a size, but no memory: what stands on them can be measured,
        and nothing more.
    """

    ptr: Any = field(repr=False)
    is_imagined: bool = False

    def imagined(self) -> BufferType:
        """Return the same without memory."""
        return replace(self, is_imagined=True)

    @property
    def name(self) -> str:
        return str(ffi.string(lib.ggml_backend_buft_name(self.ptr)).decode())

    @property
    def alignment(self) -> int:
        """Bytes at whose multiples tensors start."""
        return int(lib.ggml_backend_buft_get_alignment(self.ptr))

    @property
    def is_host(self) -> bool:
        """Whether the CPU can read and write the memory directly."""
        return bool(lib.ggml_backend_buft_is_host(self.ptr))

    @property
    def repacks(self) -> bool:
        """Whether matrices are laid out anew in it; see `Device.repack_type`."""
        return self.name == REPACKING

    def alloc_size(self, arena: Arena) -> int:
        """Return the bytes that `Buffer.allocate` would take for the arena's tensors. Allocates nothing."""
        return int(lib.ggml_backend_alloc_ctx_tensors_from_buft_size(arena.ptr, self.ptr))


def _check_repacking(arena: Arena, buffer_type: BufferType, purpose: str) -> None:
    if arena.is_repacked != buffer_type.repacks:
        raise TensorError(f"{purpose}: {buffer_type.name} and an arena with is_repacked={arena.is_repacked}")


class Buffer(Owner):
    """One allocation of backend memory.

    Made by `allocate` (room for an arena's tensors) or `wrap` (memory that exists already).
    """

    def __init__(
        self, ptr: Any, arena: Arena, memory: object = None, *, is_read_only: bool = False, imagined_nbytes: int = 0
    ) -> None:
        self.arena, self.is_read_only, self._imagined_nbytes = arena, is_read_only, imagined_nbytes
        self._n_leases = 0

        def free(buffer: Any, memory: object = memory) -> None:
            # wrapped memory is named here to outlive the buffer
            lib.ggml_backend_buffer_free(buffer)

        self._own(ptr, free, arena)
        arena.note_buffer(self)

    @classmethod
    def allocate(cls, arena: Arena, buffer_type: BufferType, purpose: str) -> Buffer:
        """Allocate one buffer for all tensors of an arena and place them in it. The memory is zeroed.

        Raises
        ------
        AllocError : the memory cannot be had; the message names `purpose` and the bytes.
        TensorError : no tensor needs memory, one is a view of a tensor without data, a scheduler has given some
            of them memory, or just one of memory and arena is for repacking.
        """
        _check_repacking(arena, buffer_type, purpose)
        if arena.grant is not None:
            raise TensorError(f"{purpose}: the arena's tensors lie in a scheduler's memory")
        arena.check_borrowed()
        n_bytes = buffer_type.alloc_size(arena)
        if n_bytes == 0:
            raise TensorError(f"{purpose}: the arena has no tensor that needs memory")
        if buffer_type.is_imagined:
            return cls._imagine(arena, buffer_type, n_bytes)
        ptr = lib.ggml_backend_alloc_ctx_tensors_from_buft(arena.ptr, buffer_type.ptr)
        if ptr == ffi.NULL:
            raise AllocError(f"{purpose}: {buffer_type.name} has no room for {n_bytes} bytes")
        buffer = cls(ptr, arena)
        arena.note_allocated()
        if buffer.is_host or buffer_type.repacks:
            lib.pykv_advise_large_pages(lib.ggml_backend_buffer_get_base(ptr), buffer.nbytes)
        buffer.clear()
        return buffer

    @classmethod
    def _imagine(cls, arena: Arena, buffer_type: BufferType, n_bytes: int) -> Buffer:
        """Let the tensors of an arena lie in a buffer without memory: a scheduler sees where they are."""
        buffer = cls(lib.ggml_backend_buft_alloc_buffer(buffer_type.ptr, 0), arena, imagined_nbytes=n_bytes)
        raw = lib.ggml_get_first_tensor(arena.ptr)
        while raw != ffi.NULL:
            if raw.view_src == ffi.NULL:
                raw.buffer = buffer.ptr
            raw = lib.ggml_get_next_tensor(arena.ptr, raw)
        arena.note_allocated()
        return buffer

    @classmethod
    def wrap(cls, arena: Arena, device: Device, memory: Any, max_tensor: int) -> Buffer:
        """Wrap host memory (an object with the buffer protocol) for a device that can read it in place.

        `max_tensor` is the largest tensor of `arena` that will be placed in it, in bytes.

        Raises
        ------
        AllocError : the device refuses.
        TensorError : the memory is empty, or starts at an address that the device does not take.
        """
        if arena.is_repacked:
            raise TensorError("an arena of repacked matrices needs memory that repacks them")
        if not device.can_wrap_host_memory:
            raise AllocError(f"{device.name} cannot use host memory in place")
        view, alignment = ffi.from_buffer(memory), device.buffer_type.alignment
        if len(view) == 0 or int(ffi.cast("uintptr_t", view)) % alignment:
            raise TensorError(f"memory of {len(view)} bytes: must not be empty and start at a multiple of {alignment}")
        ptr = lib.ggml_backend_dev_buffer_from_host_ptr(device.ptr, view, len(view), max_tensor)
        if ptr == ffi.NULL:
            raise AllocError(f"{device.name} cannot use {len(view)} bytes of host memory in place")
        return cls(ptr, arena, view, is_read_only=memoryview(memory).readonly)

    @property
    def nbytes(self) -> int:
        return self._imagined_nbytes or int(lib.ggml_backend_buffer_get_size(self.ptr))

    @property
    def is_host(self) -> bool:
        return bool(lib.ggml_backend_buffer_is_host(self.ptr))

    def mark_weights(self) -> None:
        """Tell the scheduler to prefer the device where these tensors lie."""
        lib.ggml_backend_buffer_set_usage(self.ptr, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)

    def clear(self) -> None:
        """Set all bytes to zero.

        Raises
        ------
        TensorError : the memory is read-only.
        """
        if self.is_read_only:
            raise TensorError("a buffer over read-only memory cannot be cleared")
        lib.ggml_backend_buffer_clear(self.ptr, 0)

    def place(self, tensor: Tensor, offset: int) -> None:
        """Give a tensor the memory at a byte offset.

        Raises
        ------
        TensorError : it does not fit, is misaligned, has data already, is a view, or is of another arena.
        """
        if tensor.arena is not self.arena or tensor.is_allocated or tensor.base is not None:
            raise TensorError(f"{tensor!r} has data already, is a view, or is of another arena")
        n_bytes = int(lib.ggml_backend_buffer_get_alloc_size(self.ptr, tensor.ptr))
        if offset < 0 or offset % PLACE_ALIGNMENT or offset + n_bytes > self.nbytes:
            raise TensorError(
                f"{tensor!r}: {n_bytes} bytes at {offset} leave a buffer of {self.nbytes} bytes, or do not start at a "
                f"multiple of {PLACE_ALIGNMENT}"
            )
        base = int(ffi.cast("uintptr_t", lib.ggml_backend_buffer_get_base(self.ptr)))
        status = lib.ggml_backend_tensor_alloc(self.ptr, tensor.ptr, ffi.cast("void *", base + offset))
        if status != lib.GGML_STATUS_SUCCESS:
            raise AllocError(f"{tensor!r} cannot be placed at byte {offset}")
        tensor.owner = self
        self.arena.n_placed += 1

    def adopt(self, tensor: Tensor) -> Tensor:
        """Note that this buffer holds the tensor's data, which then keeps the buffer alive; returns the tensor.

        Raises
        ------
        TensorError : it has no data here.
        """
        _ = self.ptr
        has_data = tensor.is_allocated or self._imagined_nbytes > 0
        if tensor.arena is not self.arena or not has_data or tensor.owner not in (None, self):
            raise TensorError(f"{tensor!r} has no data in this buffer")
        tensor.owner = self
        return tensor

    def host_view(self, tensor: Tensor) -> AnyArray:
        """Return the tensor's data as an array without a copy, shape `ne` reversed; writable if the memory is.

        The array is a lease: while it or a view of it lives, `close` refuses.

        Raises
        ------
        TensorError : not in this buffer, not in host memory, not contiguous, or of a type that numpy lacks.
        """
        kind = tensor.dtype.numpy_dtype
        home = tensor.base or tensor
        if home.owner is not self or not self.is_host or not tensor.is_contiguous or kind is None:
            raise TensorError(f"{tensor!r} has no host view")
        tensor.check_data()
        memory = ffi.buffer(tensor.ptr.data, prod(tensor.ne) * kind.itemsize)
        self._n_leases += 1
        weakref.finalize(memory, self._end_lease)  # the bound method keeps the buffer alive
        array = np.frombuffer(memory, kind).reshape(tuple(reversed(tensor.ne)))
        array.flags.writeable = not self.is_read_only
        return array

    def _end_lease(self) -> None:
        self._n_leases -= 1

    def close(self) -> None:
        """Free the memory.

        Raises
        ------
        ConcurrentUseError : host views of it are still alive.
        """
        if self._n_leases and not self.closed:
            raise ConcurrentUseError(f"the buffer has {self._n_leases} live host views; drop them before close()")
        super().close()
