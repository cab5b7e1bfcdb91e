"""GraphInput and GraphOutput: tensors that the caller fills before each compute and reads after it, with numpy."""

from __future__ import annotations

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
        raw, self._grant = self.tensor.ptr, self.tensor.arena.grant
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
        UseAfterCloseError : the scheduler is closed.
        """
        if self._array is None:
            raise TensorError(f"{self.tensor!r} is not bound; allocate its graph first")
        if self._grant is not None:
            self._grant.check()
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
        self._grant: Grant | None = None
        self._memory: AnyArray | None = None

    def bind(self) -> None:
        """Find the memory that the scheduler has just allocated.

        Raises
        ------
        TensorError : neither a scheduler nor a buffer has given it memory.
        """
        self._grant, self._memory = self.tensor.arena.grant, _host_memory(self.tensor)

    def read_into(self, out: AnyArray) -> None:
        """Copy the values of the last compute into an array of the tensor's type, shape `ne` reversed.

        Raises
        ------
        TensorError : the scheduler has taken the memory back.
        UseAfterCloseError : the scheduler is closed.
        """
        if self._memory is None:
            self.tensor.get_into(out)
            return
        if self._grant is not None:
            self._grant.check()
        out[...] = self._memory


def _host_memory(tensor: Tensor) -> AnyArray | None:
    """Return a tensor's data where it lies, shape `ne` reversed; None if the CPU cannot reach or numpy not read it."""
    tensor.check_data()
    raw, grant, kind = tensor.raw, tensor.arena.grant, tensor.dtype.numpy_dtype
    if kind is None or not tensor.is_contiguous or not lib.ggml_backend_buffer_is_host(raw.buffer):
        return None
    memory = ffi.buffer(raw.data, tensor.n_elements * kind.itemsize)
    home = tensor.owner if grant is None else grant.sched
    if home is not None:
        home.lend_to(memory)
    return np.frombuffer(memory, kind).reshape(tuple(reversed(tensor.ne)))
