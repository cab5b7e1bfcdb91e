"""Sched: places a graph on backends, allocates its compute memory, runs it."""

from __future__ import annotations

from collections.abc import Sequence

from pykv._native import ffi, lib
from pykv.errors import AllocError, ComputeCancelled, ComputeError, ParamError, TensorError
from pykv.ggml.backend import Backend
from pykv.ggml.buffer import BufferType
from pykv.ggml.grant import Grant
from pykv.ggml.graph import Graph
from pykv.ggml.limits import offsets_of
from pykv.ggml.owner import Owner
from pykv.ggml.pools import check_room, placing_nbytes, sched_nbytes
from pykv.ggml.row_index import RowIndex
from pykv.ggml.stored_ops import MisplacedOp, stored_ops
from pykv.typing import AnyArray

MAX_BACKENDS = 16  # ggml-backend.cpp: GGML_SCHED_MAX_BACKENDS
_MAX_NODES = 2**24
_SHARE_BESIDE = 50  # of a scheduler's bytes: what its graph's arena takes, and what the heap does not give back


class Sched(Owner):
    """A scheduler over backends in order of preference; the last one must be the CPU.

    It serves graphs of at most `graph_size` nodes and as many leaves. `stands_on` are further owners of what its
    graphs will read; they stay until the scheduler goes.
    """

    def __init__(self, backends: Sequence[Backend], graph_size: int, stands_on: Sequence[Owner] = ()) -> None:
        self.backends, self.graph_size = tuple(backends), graph_size
        self.devices = tuple(backend.device for backend in self.backends)
        if not 1 <= len(self.backends) <= MAX_BACKENDS or self.devices[-1].kind != "cpu":
            names = ", ".join(device.name for device in self.devices)
            raise ParamError(f"backends=[{names}]: 1 to {MAX_BACKENDS} of them, the last one the CPU")
        if not 1 <= graph_size <= _MAX_NODES:
            raise ParamError(f"graph_size={graph_size} must lie in 1..{_MAX_NODES}")
        self._graph: Graph | None = None
        self._grant: Grant | None = None
        self._reads: tuple[Owner, ...] = ()
        self._indices: dict[RowIndex, AnyArray] = {}
        pointers = ffi.new("ggml_backend_t[]", [backend.ptr for backend in self.backends])
        # note: ggml counts nodes and leaves in one table of this size and ends the process when it is full
        n_tensors = 2 * graph_size
        check_room(sched_nbytes(n_tensors, len(self.backends)), f"a scheduler for graphs of {graph_size} nodes")
        kinds = ffi.new("ggml_backend_buffer_type_t[]", [kind.ptr for kind in _compute_memory(self.backends)])
        ptr = lib.ggml_backend_sched_new(pointers, kinds, len(self.backends), n_tensors, False, True)
        if ptr == ffi.NULL:
            raise AllocError(f"no scheduler for graphs of {graph_size} nodes")
        self._own(ptr, lib.ggml_backend_sched_free, *self.backends, *stands_on)

    def check_successor(self, graph_size: int) -> None:
        """Raise unless a scheduler for graphs of so many nodes could be made once this one is closed.

        Raises
        ------
        AllocError : the memory cannot be had.
        """
        held, wanted = (sched_nbytes(2 * n, len(self.backends)) for n in (self.graph_size, graph_size))
        more = wanted + wanted // _SHARE_BESIDE - (0 if self.closed else held)
        check_room(max(0, more), f"a scheduler for graphs of {graph_size} nodes in place of {self.graph_size}")

    def reserve(self, graph: Graph, purpose: str) -> None:
        """Allocate compute memory for the largest graph to come. Drops any allocated graph.

        Raises
        ------
        UnsupportedOpError : a node runs on none of the backends.
        AllocError : the memory cannot be had.
        """
        self._prepare(graph)
        self._check_room(graph, f"{purpose}: a graph")
        if not lib.ggml_backend_sched_reserve(self.ptr, graph.ptr):
            raise AllocError(f"{purpose}: no memory for the compute buffers")

    def reserve_nbytes(self, graph: Graph) -> tuple[int, ...]:
        """Return the bytes on each backend that `reserve` would allocate for a graph. Allocates nothing.

        The graph is spoiled, since operands on other devices become copies: build it anew.

        Raises
        ------
        UnsupportedOpError : a node runs on none of the backends.
        AllocError : the memory to find out cannot be had.
        """
        self._prepare(graph)
        self._check_room(graph, "a graph")
        graph.arena.grant = Grant(self)
        sizes = ffi.new("size_t[]", len(self.backends))
        lib.ggml_backend_sched_reserve_size(self.ptr, graph.ptr, sizes)
        self.reset()
        return tuple(sizes)

    def allocate(self, graph: Graph) -> None:
        """Give the graph's tensors memory. The graph allocated before refuses further use.

        Raises
        ------
        UnsupportedOpError : a node runs on none of the backends.
        AllocError : the memory cannot be had.
        TensorError : the graph has been allocated before, is too large, or reads a tensor without data.
        """
        reads = self._prepare(graph)
        self._check_room(graph, "a graph")
        grant = Grant(self)
        fresh = [index for index in graph.arena.indices if not index.has_data]
        graph.arena.grant = grant  # also when it fails: some tensors may have been given memory
        # note: ggml ends the process in the call that allocates where it lacks memory that it has not reserved.
        # With several backends it cannot be asked before: reserving replaces operands by copies that are gone then
        is_reserved = len(self.backends) > 1 or lib.ggml_backend_sched_reserve(self.ptr, graph.ptr)
        if not is_reserved or not lib.ggml_backend_sched_alloc_graph(self.ptr, graph.ptr):
            raise AllocError(f"no memory for a graph of {graph.n_nodes} nodes")
        self._graph, self._grant, self._reads = graph, grant, reads
        for index in fresh:
            if index.has_data:
                index.zero()
        self._indices = _writable(graph.arena.indices)

    def misplaced(self, graph: Graph) -> list[MisplacedOp]:
        """Return the operations on stored tensors that would not run where those lie. Allocates nothing.

        The graph is spoiled, since operands on other devices become copies: build it anew.

        Raises
        ------
        UnsupportedOpError : a node runs on none of the backends.
        AllocError : the memory to find out cannot be had.
        """
        self._prepare(graph)
        self._check_room(graph, "a graph")
        ops = stored_ops(graph)
        graph.arena.grant = Grant(self)
        lib.ggml_backend_sched_split_graph(self.ptr, graph.ptr)
        homes = [lib.ggml_backend_sched_get_tensor_backend(self.ptr, op.node) for op in ops]
        by_ptr = {backend.ptr: backend.device for backend in self.backends}
        self.reset()
        placed = ((op, by_ptr[home]) for op, home in zip(ops, homes, strict=True) if home != ffi.NULL)
        return [MisplacedOp(op.name, op.stored, op.dtype, op.device, on) for op, on in placed if on != op.device]

    def _prepare(self, graph: Graph) -> tuple[Owner, ...]:
        """Check a graph and drop the one before; return what it reads."""
        _ = self.ptr, graph.ptr
        arena = graph.arena
        if arena.graph_size > self.graph_size:
            raise TensorError(f"a graph of up to {arena.graph_size} nodes; the scheduler takes {self.graph_size}")
        if arena.grant is not None:
            raise TensorError("the graph has been allocated before; reset its arena and build it anew")
        reads = arena.check_borrowed()
        graph.check_supported(self.devices)
        self.reset()
        if len(self.backends) > 1:
            among_servers = any(device.backend == "RPC" for device in self.devices)
            lib.pykv_sched_prepare(self.ptr, graph.ptr, offsets_of(self.devices), among_servers)
        return (arena, *reads)

    def _check_room(self, graph: Graph, what: str) -> None:
        n_nodes, arena = graph.n_nodes, graph.arena
        n_bytes = placing_nbytes(n_nodes, arena.n_leaves + arena.n_borrowed, len(self.backends))
        check_room(n_bytes, f"{what} of {n_nodes} nodes")

    def reset(self) -> None:
        """Forget the allocated graph; its tensors refuse further use."""
        lib.ggml_backend_sched_reset(self.ptr)
        self._drop()

    def _drop(self) -> None:
        if self._grant is not None:
            self._grant.is_current = False
        self._graph, self._grant, self._reads, self._indices = None, None, (), {}

    def close(self) -> None:
        """Free the compute memory once the arrays of its graph's inputs are gone."""
        self._drop()
        super().close()

    def compute(self, graph: Graph) -> None:
        """Run the allocated graph and wait for it.

        Raises
        ------
        ComputeCancelled : the cancel flag was set.
        ComputeError : a backend failed.
        TensorError : another graph is allocated, or none; or an index names a row that does not exist.
        UseAfterCloseError : something that it reads is closed.
        """
        ptr, raw = self.ptr, graph.ptr
        if graph is not self._graph:
            raise TensorError("the graph is not the one that the scheduler has allocated")
        for owner in self._reads:
            _ = owner.ptr
        for index, rows in self._indices.items():
            index.check(rows)
        status = lib.ggml_backend_sched_graph_compute(ptr, raw)
        if status == lib.GGML_STATUS_ABORTED:
            raise ComputeCancelled("the computation was cancelled")
        if status != lib.GGML_STATUS_SUCCESS:
            raise ComputeError(f"a backend failed to compute the graph (status {status})")

    def synchronize(self) -> None:
        """Wait for everything queued on the backends."""
        lib.ggml_backend_sched_synchronize(self.ptr)

    @property
    def nbytes(self) -> int:
        """Compute memory over all backends, in bytes."""
        return sum(map(self.nbytes_on, self.backends))

    def nbytes_on(self, backend: Backend) -> int:
        """Return the compute memory on one of the backends, in bytes."""
        return int(lib.ggml_backend_sched_get_buffer_size(self.ptr, backend.ptr))


def _compute_memory(backends: Sequence[Backend]) -> list[BufferType]:
    """Return where each backend's results lie. The CPU's, and all inputs, lie where the first device copies fastest."""
    own = [backend.buffer_type for backend in backends]
    shared = backends[0].device.host_buffer_type
    return own if shared is None else [*own[:-1], shared]


def _writable(indices: Sequence[RowIndex]) -> dict[RowIndex, AnyArray]:
    """Return the memory of those that the caller can write without pykv; the others were checked when set."""
    views = {index: index.host_view() for index in indices if index.has_data}
    return {index: view for index, view in views.items() if view is not None}
