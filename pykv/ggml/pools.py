"""What ggml allocates for itself: it ends the process when that fails, so room for it is shown right before."""

from __future__ import annotations

from typing import Any

from pykv._native import ffi, lib
from pykv.errors import AllocError

_SPLIT_INPUTS = 30  # ggml-backend.cpp: GGML_SCHED_MAX_SPLIT_INPUTS
_SOURCES = 10  # ggml.h: GGML_MAX_SRC
_POINTER, _INT, _PLACE = 8, 4, 32  # bytes; a place is what ggml-alloc.c notes of where a tensor lies
_SPLIT = 256  # bytes of a piece of a graph that runs on one backend, at most
_SMALL = 2**20  # everything that does not grow with the graph, and what the heap grows by at once
_new_pool = ffi.new_allocator(should_clear_after_alloc=False)


def pool(n_bytes: int, what: str) -> Any:
    """Return C memory that is not cleared; it goes with its last reference.

    Raises
    ------
    AllocError : it cannot be had; names `what` and the bytes.
    """
    try:
        return _new_pool("char[]", n_bytes)
    except (MemoryError, OverflowError) as error:
        raise AllocError(f"no memory for {what} ({n_bytes} bytes)") from error


def check_room(n_bytes: int, what: str) -> None:
    """Raise unless ggml can allocate so many bytes in the next call.

    Raises
    ------
    AllocError : it cannot; names `what` and the bytes.
    """
    pool(n_bytes, what)  # given back at once: it was never touched


def sched_nbytes(n_tensors: int, n_backends: int) -> int:
    """Return the bytes that a scheduler takes when it is made, at most.

    Source: ggml-backend.cpp, ggml_backend_sched_new. `n_tensors` are nodes and leaves together.
    """
    n_copies = 2 * _SPLIT_INPUTS * n_tensors
    headers = n_copies * ffi.sizeof("struct ggml_tensor") + lib.ggml_graph_overhead_custom(n_tensors, False)
    table = _table(n_tensors, _INT + n_backends * _POINTER)
    backend_ids = 4 * _INT * (n_tensors + n_copies)
    return int(headers) + table + backend_ids + _SMALL


def placing_nbytes(n_nodes: int, n_leaves: int, n_backends: int) -> int:
    """Return the bytes beside the compute buffers that it takes to place a graph, at most.

    Source: ggml-backend.cpp, ggml_backend_sched_split_graph; ggml-alloc.c, ggml_gallocr_reserve_n.
    """
    # every tensor is copied once at most to each backend that it does not lie on; that takes two nodes
    n_inputs = (n_nodes + n_leaves) * (n_backends - 1)
    n_splits = n_nodes if n_backends > 1 else 1
    # a list grows by doubling, and is there twice while it moves
    splits = n_splits * (3 * _SPLIT + _SPLIT_INPUTS * _POINTER) + 3 * n_inputs * _POINTER
    n_placed = n_nodes + 2 * n_inputs
    lists = 2 * _POINTER * (max(n_nodes, n_leaves) + 2 * n_inputs)
    table = _table((n_placed + n_leaves) * 5 // 4, 2 * _PLACE)
    places = _PLACE * ((1 + _SOURCES) * n_placed + n_leaves)
    return splits + lists + table + places + _SMALL


def _table(n: int, n_bytes: int) -> int:
    """Return the bytes of a hash table over `n` tensors with so many bytes for each, at most.

    Its size is the first prime behind a power of two that is enough.
    """
    return (2 * n + 64) * (n_bytes + _POINTER + 1)
