"""Arena: a ggml context that holds tensor headers, never data, with a budget that cannot be overrun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykv._native import ffi, lib
from pykv.errors import AllocError, TensorError
from pykv.ggml.owner import Owner
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

MAX_NAME = int(lib.GGML_MAX_NAME) - 1


class Arena(Owner):
    """Room for `n_tensors` tensor headers and, if `graph_size` is given, one graph of that many nodes.

    Tensors keep their arena alive. ggml would end the process when its pool overflows; an arena raises.
    """

    def __init__(self, n_tensors: int, graph_size: int = 0) -> None:
        if n_tensors < 1 or graph_size < 0:
            raise TensorError(f"n_tensors={n_tensors} and graph_size={graph_size} must be positive")
        n_bytes = n_tensors * lib.ggml_tensor_overhead()
        if graph_size:
            n_bytes += lib.ggml_graph_overhead_custom(graph_size, False)
        params = ffi.new("struct ggml_init_params *", {"mem_size": n_bytes, "mem_buffer": ffi.NULL, "no_alloc": True})
        ptr = lib.ggml_init(params[0])
        if ptr == ffi.NULL:
            raise AllocError(f"no memory for an arena of {n_tensors} tensors ({n_bytes} bytes)")
        self.n_tensors, self.n_used, self.graph_size = n_tensors, 0, graph_size
        self._own(ptr, lib.ggml_free)

    def take(self) -> Any:
        """Count one more tensor and return the C context to make it in."""
        if self.n_used >= self.n_tensors:
            raise TensorError(f"the arena is full: its budget is {self.n_tensors} tensors")
        ptr = self.ptr
        self.n_used += 1
        return ptr

    def tensor(self, dtype: DType, ne: tuple[int, ...], name: str = "") -> Tensor:
        """Return a new tensor without data, `[ne0, ne1, ne2, ne3]`, trailing ones left out at will.

        Raises
        ------
        TensorError : a dim below one, more than four dims, or a first dim that is no whole number of blocks.
        """
        if not 1 <= len(ne) <= 4 or min(ne) < 1:
            raise TensorError(f"ne={ne}: one to four dims, each at least 1")
        dtype.row_size(ne[0])
        raw = lib.ggml_new_tensor(self.take(), dtype, len(ne), ffi.new("int64_t[4]", ne))
        tensor = Tensor(raw, self)
        return tensor.named(name) if name else tensor

    def reset(self) -> None:
        """Forget all tensors and the graph, keep the memory. Tensors made before must not be used again."""
        lib.ggml_reset(self.ptr)
        self.n_used = 0

    def __iter__(self) -> Iterator[Tensor]:
        raw = lib.ggml_get_first_tensor(self.ptr)
        while raw != ffi.NULL:
            yield Tensor(raw, self)
            raw = lib.ggml_get_next_tensor(self.ptr, raw)
