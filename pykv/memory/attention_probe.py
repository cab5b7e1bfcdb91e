"""Which attention path is faster on a device, found by running both once. Cached in the process.

No table of models or machines: kernels change with every version of ggml.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from statistics import median

from pykv.errors import PykvError, UnsupportedOpError
from pykv.ggml import Arena, Backend, Buffer, Device, DType, Graph, GraphInput, Sched, Tensor, cpu_device, ops
from pykv.log import logger
from pykv.memory.attention import AttentionParams, AttentionPath, KVView, attend

_LOG = logger(__name__)

N_ROUNDS = 5
MAX_DEPTH = 4096


@dataclass(frozen=True)
class ProbeShape:
    """One attention layer, as it will be used.

    Attributes
    ----------
    n_kv : cells that a token will look at.
    """

    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_kv: int
    type_k: DType
    type_v: DType


@cache
def faster_path(device: Device, n_threads: int, shape: ProbeShape) -> AttentionPath:
    """Return the path that answers one token sooner. Takes a few tens of milliseconds the first time."""
    started = time.perf_counter()
    times = {path: _time(device, n_threads, shape, path) for path in AttentionPath}
    best = min(times, key=lambda path: times[path])
    _LOG.info(
        "attention on %s over %d cells: %s; taking %s (measured in %.0f ms)",
        device.name,
        shape.n_kv,
        ", ".join(f"{path.value} {1e3 * seconds:.2f} ms" for path, seconds in times.items()),
        best.value,
        1e3 * (time.perf_counter() - started),
    )
    return best


def _time(device: Device, n_threads: int, shape: ProbeShape, path: AttentionPath) -> float:
    """Return the median seconds of one token through one layer, infinity where the path does not run."""
    if path is AttentionPath.GROUPED and shape.type_v.is_quantized:
        return float("inf")
    devices = (device,) if device.kind == "cpu" else (device, cpu_device())
    backends = [Backend(d, n_threads) for d in devices]
    try:
        return _run(device, backends, shape, path)
    except UnsupportedOpError:
        return float("inf")
    except PykvError as error:
        _LOG.warning("attention path %s could not be measured: %s", path.value, error)
        return float("inf")
    finally:
        for backend in backends:
            backend.close()


def _run(device: Device, backends: list[Backend], shape: ProbeShape, path: AttentionPath) -> float:
    weights = Arena(2)
    k, v = _stored(weights, shape, path)
    graph = Graph(Arena(64, 64))
    arena = graph.arena
    q = GraphInput(arena.tensor(DType.F32, (shape.n_embd_head_k, shape.n_head, 1), "q"))
    mask = GraphInput(arena.tensor(path.mask_dtype, (shape.n_kv, 1, 1, 1), "mask"))
    kv = _view(arena, k, v, shape, path)
    graph.expand(attend(arena, path, q.tensor, kv, mask.tensor, AttentionParams(1.0)).as_output())
    with Buffer.allocate(weights, device.buffer_type, "attention probe") as buffer:
        buffer.mark_weights()  # holds the computation on this device
        with Sched(backends, arena.graph_size, [buffer, arena]) as sched:
            if not all(device.supports_op(node) for node in graph.nodes()):
                raise UnsupportedOpError(f"{path.value} attention does not run on {device.name}")
            sched.allocate(graph)
            times = []
            for _ in range(N_ROUNDS + 1):
                for one in (q, mask):
                    one.bind()
                    one.array.fill(0)
                    one.commit()
                started = time.perf_counter()
                sched.compute(graph)
                times.append(time.perf_counter() - started)
    return median(times[1:])


def _stored(arena: Arena, shape: ProbeShape, path: AttentionPath) -> tuple[Tensor, Tensor]:
    n_k, n_v = shape.n_head_kv * shape.n_embd_head_k, shape.n_head_kv * shape.n_embd_head_v
    v_ne = (n_v, shape.n_kv) if path is AttentionPath.FLASH else (shape.n_kv, n_v)
    return arena.tensor(shape.type_k, (n_k, shape.n_kv), "k"), arena.tensor(shape.type_v, v_ne, "v")


def _view(arena: Arena, k: Tensor, v: Tensor, shape: ProbeShape, path: AttentionPath) -> KVView:
    n_kv, n_head = shape.n_kv, shape.n_head_kv
    k_row, v_row = k.dtype.row_size, v.dtype.row_size
    head_k, head_v = shape.n_embd_head_k, shape.n_embd_head_v
    k_view = ops.view(arena, k, (head_k, n_head, n_kv, 1), (k_row(head_k), k.nb[1], k.nb[2]))
    if path is AttentionPath.FLASH:
        v_view = ops.view(arena, v, (head_v, n_head, n_kv, 1), (v_row(head_v), v.nb[1], v.nb[2]))
        return KVView(k_view, v_view, v_trans=False)
    v_view = ops.view(arena, v, (n_kv, n_head, head_v, 1), (v.nb[1] * head_v, v.nb[1], v.nb[2]))
    return KVView(k_view, v_view, v_trans=True)
