"""GraphInput and GraphOutput: tensors that the caller fills before each compute and reads after it, with numpy."""

from __future__ import annotations

from math import prod

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import TensorError
from pykv.ggml.grant import Grant
from pykv.ggml.tensor import Tensor
from pykv.typing import AnyArray


class GraphInput:
    """An input of a graph.

    `array` is the tensor's own memory where the CPU can reach it, else a staging copy; shape `ne` reversed.
    A scheduler may use the memory of an input again once its last reader has run: fill all inputs before
    every compute, and keep no reference to `array` beyond the graph.
    """

    def __init__(self, tensor: Tensor) -> None:
        kind = tensor.dtype.numpy_dtype
        if kind is None:
            raise TensorError(f"{tensor!r} cannot be filled from numpy")
        self.tensor = tensor.as_input()
        self._kind = kind
        self._staged = False
        self._grant: Grant | None = None
        self._array: AnyArray | None = None

    def bind(self) -> None:
        """Find the memory that the scheduler has just allocated. An input that no node reads gets scratch.

        Raises
        ------
        TensorError : neither a scheduler nor a buffer has given it memory.
        """
        raw, self._grant = self.tensor.ptr, _grant(self.tensor)
        shape = tuple(reversed(self.tensor.ne))
        if raw.data == ffi.NULL and self._grant is not None:
            self._grant.check()
            self._staged, self._array = False, np.zeros(shape, self._kind)
            return
        memory = _host_memory(self.tensor)
        self._staged = memory is None
        self._array = np.zeros(shape, self._kind) if memory is None else memory

    @property
    def array(self) -> AnyArray:
        """The memory to fill.

        Raises
        ------
        TensorError : not bound, or the scheduler has taken the memory back.
        UseAfterCloseError : the scheduler or the buffer is closed.
        """
        if self._array is None:
            raise TensorError(f"{self.tensor!r} is not bound; allocate its graph first")
        _check_held(self.tensor, self._grant)
        return self._array

    def write(self, values: AnyArray) -> None:
        """Fill the array with values that broadcast to its shape, and hand it over."""
        self.array[...] = values
        self.commit()

    def commit(self) -> None:
        """Hand the array to the device, if it is not there already."""
        if self._staged:
            self.tensor.set(self.array)


class GraphOutput:
    """An output of a graph, read where it lies if the CPU can reach that."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.as_output()
        kind = tensor.dtype.numpy_dtype
        self._kind = np.dtype(np.uint8 if kind is None else kind)
        self._shape = (tensor.nbytes,) if kind is None else tuple(reversed(tensor.ne))
        self._n_elements = prod(self._shape)
        self._grant: Grant | None = None
        self._memory: AnyArray | None = None

    def bind(self) -> None:
        """Find the memory that the scheduler has just allocated.

        Raises
        ------
        TensorError : neither a scheduler nor a buffer has given it memory.
        """
        self._grant, self._memory = _grant(self.tensor), _host_memory(self.tensor)

    def read_into(self, out: AnyArray) -> None:
        """Copy the values of the last compute into an array of the tensor's type.

        Its shape is `ne` reversed, leading ones left out at will. Types that numpy lacks come as uint8 (nbytes,).

        Raises
        ------
        TensorError : the array is of another type or shape or read-only, or the scheduler has taken the memory back.
        UseAfterCloseError : the scheduler or the buffer is closed.
        """
        # note: numpy would broadcast and convert
        is_fit = out.shape == self._shape[-out.ndim :] and out.size == self._n_elements and out.dtype == self._kind
        if not is_fit or not out.flags.writeable:
            raise TensorError(
                f"out of shape {out.shape} and type {out.dtype}: {self.tensor!r} is read into a writable array of "
                f"shape {self._shape} and type {self._kind}"
            )
        if self._memory is None:
            self.tensor.get_into(out)
            return
        _check_held(self.tensor, self._grant)
        out[...] = self._memory


def _grant(tensor: Tensor) -> Grant | None:
    """Return what a scheduler has promised of a tensor's memory, None if it lies in a buffer."""
    home = tensor.base or tensor
    return home.arena.grant_of(home)


def _check_held(tensor: Tensor, grant: Grant | None) -> None:
    """Raise unless the memory that a tensor was bound to is still there."""
    if grant is None:
        tensor.check_data()
    else:
        grant.check()


def _host_memory(tensor: Tensor) -> AnyArray | None:
    """Return a tensor's data where it lies, shape `ne` reversed; None if the CPU cannot reach or numpy not read it."""
    tensor.check_data()
    home, grant, kind = tensor.base or tensor, _grant(tensor), tensor.dtype.numpy_dtype
    # note: ggml notes the buffer of a view late, and ends the process when it is asked about none
    if kind is None or not tensor.is_contiguous or not lib.ggml_backend_buffer_is_host(home.raw.buffer):
        return None
    memory = ffi.buffer(tensor.raw.data, tensor.n_elements * kind.itemsize)
    owners = home.arena.open_buffers() if grant is None else [grant.sched]
    for owner in owners:
        owner.lend_to(memory)
    return np.frombuffer(memory, kind).reshape(tuple(reversed(tensor.ne)))
