"""GraphInput: a tensor that the caller fills before each compute, as a numpy array."""

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
        self.tensor.check_data()
        self._staged = not lib.ggml_backend_buffer_is_host(raw.buffer)
        if self._staged:
            self._array = np.zeros(shape, self._kind)
            return
        memory = ffi.buffer(raw.data, self.tensor.n_elements * self._kind.itemsize)
        home = self.tensor.owner if self._grant is None else self._grant.sched
        if home is not None:
            home.lend_to(memory)
        self._array = np.frombuffer(memory, self._kind).reshape(shape)

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

    def commit(self) -> None:
        """Hand the array to the device, if it is not there already."""
        if self._staged:
            self.tensor.set(self.array)
