"""ggml without pykv's checks: what a caller of the C functions would write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pykv._native import ffi, lib

F32, F16, BF16 = lib.GGML_TYPE_F32, lib.GGML_TYPE_F16, lib.GGML_TYPE_BF16
I8, I32, I64 = lib.GGML_TYPE_I8, lib.GGML_TYPE_I32, lib.GGML_TYPE_I64
Q8_0, Q8_1 = lib.GGML_TYPE_Q8_0, lib.GGML_TYPE_Q8_1


def context(n_tensors: int = 64, graph_size: int = 0) -> Any:
    """Return a context for headers."""
    n_bytes = n_tensors * lib.ggml_tensor_overhead()
    if graph_size:
        n_bytes += lib.ggml_graph_overhead_custom(graph_size, False)
    params = {"mem_size": n_bytes, "mem_buffer": ffi.NULL, "no_alloc": True}
    return lib.ggml_init(ffi.new("struct ggml_init_params *", params)[0])


def tensor(ctx: Any, dtype: int, *ne: int) -> Any:
    """Return a new tensor without data."""
    return lib.ggml_new_tensor(ctx, dtype, len(ne), ffi.new("int64_t[]", ne))


def cpu() -> Any:
    """Return a CPU backend with one thread."""
    devices = (lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count()))
    for device in devices:
        props = ffi.new("struct ggml_backend_dev_props *")
        lib.ggml_backend_dev_get_props(device, props)
        if props.type == lib.GGML_BACKEND_DEVICE_TYPE_CPU:
            backend = lib.ggml_backend_dev_init(device, ffi.NULL)
            lib.pykv_backend_set_n_threads(backend, 1)
            return backend
    raise AssertionError("no CPU")


def schedule(*backends: Any, graph_size: int = 64) -> Any:
    """Return a scheduler."""
    pointers = ffi.new("ggml_backend_t[]", backends)
    return lib.ggml_backend_sched_new(pointers, ffi.NULL, len(backends), graph_size, False, True)


def place(ctx: Any) -> Any:
    """Give all tensors of a context memory."""
    buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(ctx, lib.ggml_backend_cpu_buffer_type())
    lib.ggml_backend_buffer_clear(buffer, 0)
    return buffer


def graph_of(*nodes: Any, size: int = 64) -> Any:
    """Return a graph of nodes, in a context of its own."""
    graph = lib.ggml_new_graph_custom(context(1, size), size, False)
    for node in nodes:
        lib.ggml_build_forward_expand(graph, node)
    return graph


def compute(ctx: Any, node: Any, fill: Callable[[], None] | None = None) -> None:
    """Place everything in `ctx`, fill it with zeros and what `fill` writes, then compute a node of it."""
    place(ctx)
    if fill is not None:
        fill()
    sched = schedule(cpu())
    graph = graph_of(node)
    lib.ggml_backend_sched_alloc_graph(sched, graph)
    lib.ggml_backend_sched_graph_compute(sched, graph)
