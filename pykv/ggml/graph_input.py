"""GraphInput: a tensor that the caller fills before each compute, as a numpy array."""

from __future__ import annotations

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import TensorError
from pykv.ggml.tensor import Tensor
from pykv.typing import AnyArray


class GraphInput:
    """An input of a graph.

    `array` is the tensor's own memory where the CPU can reach it, else a staging copy; shape `ne` reversed.
    A scheduler may use the memory of an input again once its last reader has run: fill all inputs before
    every compute.
    """

    def __init__(self, tensor: Tensor) -> None:
        kind = tensor.dtype.numpy_dtype
        if kind is None:
            raise TensorError(f"{tensor!r} cannot be filled from numpy")
        self.tensor = tensor.as_input()
        self._kind = kind
        self._staged = False
        self.array: AnyArray = np.empty(0, kind)

    def bind(self) -> None:
        """Find the memory that the scheduler has just allocated; an input that no node reads gets scratch instead."""
        raw = self.tensor.raw
        is_read = raw.buffer != ffi.NULL
        self._staged = bool(is_read and not lib.ggml_backend_buffer_is_host(raw.buffer))
        shape = tuple(reversed(self.tensor.ne))
        if self._staged or not is_read:
            self.array = np.zeros(shape, self._kind)
        else:
            memory = ffi.buffer(raw.data, self.tensor.n_elements * self._kind.itemsize)
            self.array = np.frombuffer(memory, self._kind).reshape(shape)

    def commit(self) -> None:
        """Hand the array to the device, if it is not there already."""
        if self._staged:
            self.tensor.set(self.array)
