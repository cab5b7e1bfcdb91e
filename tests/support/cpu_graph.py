"""One graph on the CPU or another device, from numpy arrays to numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from pykv.ggml import Arena, Backend, Buffer, Device, DType, Graph, Sched, Tensor, cpu_device, from_float

_DTYPES = {
    np.dtype(np.float32): DType.F32,
    np.dtype(np.float16): DType.F16,
    np.dtype(np.int32): DType.I32,
    np.dtype(np.int64): DType.I64,
}


@dataclass
class Bench:
    """Operands with data in one arena, nodes in another."""

    device: Device = field(default_factory=cpu_device)
    nodes: Arena = field(default_factory=lambda: Arena(64, 64))
    operands: Arena = field(default_factory=lambda: Arena(32))
    values: dict[Tensor, np.ndarray] = field(default_factory=dict)
    n_threads: int = 1

    def put(self, array: np.ndarray, dtype: DType | None = None) -> Tensor:
        """Return an operand `ne` of the array's shape reversed, stored as `dtype`."""
        array = np.ascontiguousarray(array)
        kind = _DTYPES[array.dtype] if dtype is None else dtype
        tensor = self.operands.tensor(kind, tuple(reversed(array.shape)) or (1,))
        is_plain = dtype is None or array.dtype == kind.numpy_dtype
        self.values[tensor] = array if is_plain else from_float(kind, array)
        return tensor

    @contextmanager
    def computed(self, *outputs: Tensor) -> Iterator[None]:
        """Compute; the outputs can be read within."""
        graph = Graph(self.nodes)
        for output in outputs:
            graph.expand(output.as_output())
        with ExitStack() as stack:
            buffer = stack.enter_context(Buffer.allocate(self.operands, self.device.buffer_type, "operands"))
            for tensor, array in self.values.items():
                buffer.adopt(tensor).set(array)
            devices = dict.fromkeys((self.device, cpu_device()))
            backends = [stack.enter_context(Backend(device, self.n_threads)) for device in devices]
            sched = stack.enter_context(Sched(backends, self.nodes.graph_size))
            sched.allocate(graph)
            sched.compute(graph)
            yield


def run(build: Callable[..., Tensor], *arrays: np.ndarray | tuple[np.ndarray, DType]) -> np.ndarray:
    """Return what an operation makes of arrays: ``build(arena, *operands)``, shape `ne` reversed.

    An array with a type is stored in that type.
    """
    bench = Bench()
    operands = [bench.put(*(a if isinstance(a, tuple) else (a,))) for a in arrays]
    out = build(bench.nodes, *operands)
    with bench.computed(out):
        return out.numpy() if out.dtype.numpy_dtype is not None else out.to_f32()
