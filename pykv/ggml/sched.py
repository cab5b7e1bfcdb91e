"""Sched: places a graph on backends, allocates its compute memory, runs it."""

from __future__ import annotations

from collections.abc import Sequence

from pykv._native import ffi, lib
from pykv.errors import AllocError, ComputeCancelled, ComputeError
from pykv.ggml.backend import Backend
from pykv.ggml.graph import Graph
from pykv.ggml.owner import Owner
from pykv.ggml.tensor import Tensor


class Sched(Owner):
    """A scheduler over backends in order of preference; the last one must be the CPU.

    `stands_on` are the owners of what its graphs will read; they stay until the scheduler goes.
    """

    def __init__(self, backends: Sequence[Backend], graph_size: int, stands_on: Sequence[Owner] = ()) -> None:
        self.backends = tuple(backends)
        self.devices = tuple(backend.device for backend in self.backends)
        pointers = ffi.new("ggml_backend_t[]", [backend.ptr for backend in self.backends])
        ptr = lib.ggml_backend_sched_new(pointers, ffi.NULL, len(self.backends), graph_size, False, True)
        if ptr == ffi.NULL:
            raise AllocError(f"no scheduler for graphs of {graph_size} nodes")
        self._own(ptr, lib.ggml_backend_sched_free, *self.backends, *stands_on)

    def reserve(self, graph: Graph, purpose: str) -> None:
        """Allocate compute memory for the largest graph to come. Drops any allocated graph.

        Raises
        ------
        AllocError : the memory cannot be had.
        """
        lib.ggml_backend_sched_reset(self.ptr)
        if not lib.ggml_backend_sched_reserve(self.ptr, graph.ptr):
            raise AllocError(f"{purpose}: no memory for the compute buffers")

    def allocate(self, graph: Graph) -> None:
        """Give the graph's tensors memory. The graph allocated before must not be used again.

        Raises
        ------
        UnsupportedOpError : a node runs on none of the backends.
        AllocError : the memory cannot be had.
        """
        graph.check_supported(self.devices)
        lib.ggml_backend_sched_reset(self.ptr)
        if not lib.ggml_backend_sched_alloc_graph(self.ptr, graph.ptr):
            raise AllocError(f"no memory for a graph of {graph.n_nodes} nodes")

    def reset(self) -> None:
        """Forget the allocated graph."""
        lib.ggml_backend_sched_reset(self.ptr)

    def compute(self, graph: Graph) -> None:
        """Run the allocated graph and wait for it.

        Raises
        ------
        ComputeCancelled : the cancel flag was set.
        ComputeError : a backend failed.
        """
        status = lib.ggml_backend_sched_graph_compute(self.ptr, graph.ptr)
        if status == lib.GGML_STATUS_ABORTED:
            raise ComputeCancelled("the computation was cancelled")
        if status != lib.GGML_STATUS_SUCCESS:
            raise ComputeError(f"a backend failed to compute the graph (status {status})")

    def pin(self, tensor: Tensor, backend: Backend) -> None:
        """Make a node of the graph to be allocated next run on one backend."""
        lib.ggml_backend_sched_set_tensor_backend(self.ptr, tensor.ptr, backend.ptr)

    def synchronize(self) -> None:
        lib.ggml_backend_sched_synchronize(self.ptr)

    @property
    def nbytes(self) -> int:
        """Compute memory over all backends, in bytes."""
        return sum(int(lib.ggml_backend_sched_get_buffer_size(self.ptr, b.ptr)) for b in self.backends)
