"""Time attention of a few tokens over a cache, path by path, beside a plain read of the same bytes.

    python benchmarks/attention.py [--threads N] [--shapes 9/3/64 32/8/128] [--cells 7680 32768] [--types f16 q8_0]
                                   [--rows 1 17 32 63]

Each measurement visits layers in turn, enough of them that none is still in the processor's cache, as generation does.
Types, paths and reads go in turns, all in this run. Prints one line of JSON: medians in ms a layer, and medians over
rounds of ratios within a round: of each path to the read, 1 is as fast as memory; of each type to the first one. Needs
a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peer import machine, say

from pykv.ggml import Arena, Backend, Buffer, DType, Graph, GraphInput, Sched, Tensor, cpu_device, from_float, ops
from pykv.memory.attention import AttentionParams, AttentionPath, KVView, attend
from pykv.memory.kv_views import Cells, Heads, by_channel, by_row

HERE = Path(__file__).parent
BEYOND_CACHES = 256 * 2**20
"""Bytes that a measurement visits at least: more than any cache of today's processors keeps."""


@dataclass(frozen=True)
class Shape:
    """One layer: query heads, KV heads, their width; cells and types of K and V; tokens that attend."""

    n_head: int
    n_head_kv: int
    head: int
    n_kv: int
    dtype: DType
    n_rows: int = 1

    @property
    def row_nbytes(self) -> int:
        return int(self.dtype.row_size(self.n_head_kv * self.head))

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return 2 * self.row_nbytes * self.n_kv

    @property
    def n_layer(self) -> int:
        return max(2, -(-BEYOND_CACHES // self.nbytes))

    def paths(self) -> list[AttentionPath]:
        """Return the paths that run: blocks cannot be transposed."""
        return [path for path in AttentionPath if path is not AttentionPath.GROUPED or not self.dtype.is_quantized]

    def __str__(self) -> str:
        heads = f"{self.n_head}/{self.n_head_kv} heads of {self.head}"
        return f"{heads}, {self.dtype.label}, {self.n_kv} cells, {self.n_rows} tokens"


class Layers:
    """K and V of several layers, and one graph that attends to each by one path."""

    def __init__(self, stack: ExitStack, shape: Shape, path: AttentionPath, n_threads: int) -> None:
        self.shape, self._path = shape, path
        self._stored = Arena(2 * shape.n_layer)
        self._tensors: list[Tensor] = []
        graph = Graph(Arena(48 * shape.n_layer + 2, 48 * shape.n_layer + 2))
        arena = graph.arena
        self._q = GraphInput(arena.tensor(DType.F32, (shape.head, shape.n_head, shape.n_rows), "q"))
        self._mask = GraphInput(arena.tensor(path.mask_dtype, (shape.n_kv, shape.n_rows), "mask"))
        for _ in range(shape.n_layer):
            kv, tensors = new_cells(self._stored, arena, shape, path is AttentionPath.GROUPED)
            self._tensors += tensors
            out = attend(arena, path, self._q.tensor, kv, self._mask.tensor, AttentionParams(shape.head**-0.5))
            graph.expand(out.as_output())
        cpu = cpu_device()
        self.buffer = stack.enter_context(Buffer.allocate(self._stored, cpu.buffer_type, "cells"))
        self._fill()
        backend = stack.enter_context(Backend(cpu, n_threads))
        self._sched = stack.enter_context(Sched([backend], arena.graph_size, [self.buffer, arena]))
        self._sched.allocate(graph)
        self._graph = graph
        rng = np.random.default_rng(0)
        for one, value in ((self._q, rng.standard_normal((shape.n_rows, shape.n_head, shape.head))), (self._mask, 0)):
            one.bind()
            one.array[...] = value
            one.commit()

    def seconds(self) -> float:
        """Return what one layer took."""
        begin = time.perf_counter()
        self._sched.compute(self._graph)
        return (time.perf_counter() - begin) / self.shape.n_layer

    def _fill(self) -> None:
        stored = made_up(self.shape)
        for tensor in self._tensors:
            self.buffer.adopt(tensor).set(stored)


def new_cells(stored: Arena, arena: Arena, shape: Shape, v_trans: bool) -> tuple[KVView, list[Tensor]]:
    """Return views of new K and V as they lie in a cache, and the two tensors themselves."""
    heads, cells = Heads(shape.n_head_kv, shape.head), Cells(shape.n_kv)
    k, v = (stored.tensor(shape.dtype, (heads.n * heads.width, cells.n)) for _ in range(2))
    v_view = (by_channel if v_trans else by_row)(arena, v, heads, cells)
    return KVView(by_row(arena, k, heads, cells), v_view, v_trans), [k, v]


def made_up(shape: Shape) -> NDArray[np.uint8]:
    """Return what fills K, or V, of one layer."""
    values = np.random.default_rng(1).standard_normal(shape.n_kv * shape.n_head_kv * shape.head, np.float32)
    return from_float(shape.dtype, values)


class PlainRead:
    """Reads as many bytes as the layers of a shape have, by as many threads."""

    def __init__(self, stack: ExitStack, n_threads: int) -> None:
        library = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "plain_read.so"
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([*command, str(HERE / "plain_read.c"), "-o", str(library)], check=True)
        self._read = ctypes.CDLL(str(library)).plain_read
        self._read.argtypes, self._read.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64
        self._pool = stack.enter_context(ThreadPoolExecutor(n_threads))
        self._n_threads = n_threads

    def seconds(self, memory: NDArray[np.uint8], shape: Shape) -> float:
        """Return what the bytes of one layer took."""
        parts = np.array_split(memory[: shape.nbytes * shape.n_layer], self._n_threads)
        begin = time.perf_counter()
        list(self._pool.map(lambda part: self._read(part.ctypes.data, part.nbytes // 8), parts))
        return (time.perf_counter() - begin) / shape.n_layer


def measure(shapes: list[Shape], n_threads: int, rounds: int, memory: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Return medians in ms a layer and ratios to the read, and to the first shape, of shapes that go in turns."""
    times: list[dict[str, list[float]]] = [{} for _ in shapes]
    with ExitStack() as stack:
        read = PlainRead(stack, n_threads)
        layers = [{path: Layers(stack, shape, path, n_threads) for path in shape.paths()} for shape in shapes]
        for turn in range(rounds + 1):
            for shape, paths, its in zip(shapes, layers, times, strict=True):
                taken = {"read": read.seconds(memory, shape)}
                taken |= {path.value: one.seconds() for path, one in paths.items()}
                for name, seconds in taken.items() if turn else ():  # the first turn warms up only
                    its.setdefault(name, []).append(seconds)
    found = [summary(its) for its in times]
    for shape, its, out in zip(shapes[1:], times[1:], found[1:], strict=True):
        for name in its.keys() & times[0].keys():
            out[f"{name}: {shape.dtype.label} / {shapes[0].dtype.label}"] = ratio(its[name], times[0][name])
    return found


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians in ms, and ratios to the read."""
    out: dict[str, Any] = {name: round(1e3 * median(values), 3) for name, values in times.items()}
    return out | {f"{name} / read": ratio(values, times["read"]) for name, values in times.items() if name != "read"}


def ratio(ours: list[float], others: list[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return round(median(a / b for a, b in zip(ours, others, strict=True)), 2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["9/3/64", "32/8/128"], help="query heads/KV heads/width")
    parser.add_argument("--cells", type=int, nargs="*", default=[7680, 32768])
    parser.add_argument("--types", nargs="*", default=["f16", "q8_0"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 17, 32, 63], help="tokens at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    result: dict[str, Any] = {"benchmark": "attention", "machine": machine(), "threads": args.threads}
    result["kernel"] = ops.fused_isa()
    groups = [
        [Shape(*map(int, text.split("/")), n_kv, DType.parse(label, "types"), n_rows) for label in args.types]
        for text in args.shapes
        for n_kv in args.cells
        for n_rows in args.rows
    ]
    memory = np.ones(max(shape.nbytes * shape.n_layer for group in groups for shape in group), np.uint8)
    for group in groups:
        for shape, found in zip(group, measure(group, args.threads, args.rounds, memory), strict=True):
            key = f"{shape}, ms a layer"
            result[key] = found
            say(f"{key}: {found}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
