"""Widening: matrices of 5 bits kept as 8 bits, exactly, where this machine is faster at products with those.

A block of q5_0 is a scale and 32 numbers of -16 to 15; one of q8_0 is a scale and 32 bytes. Unpacking five bits costs
more than reading half as many bytes again, unless memory is what a product waits for.
"""

from __future__ import annotations

import os
import time
from functools import cache

import numpy as np

from pykv.ggml import Arena, Backend, Buffer, Device, DType, Graph, GraphInput, Sched, ops
from pykv.log import logger
from pykv.typing import AnyArray

_LOG = logger(__name__)

NARROW, WIDE = DType.Q5_0, DType.Q8_0
GROWTH = WIDE.type_size / NARROW.type_size
"""How many times the bytes a widened matrix takes."""

_SHAPE = (4096, 8192)
"""Of a matrix that stays in no core's cache, as those of a model do not from one token to the next."""

_COLUMNS = (1, 8)
"""Tokens at once: as in generation, and as many as tell what a prompt would take."""

_N_RUNS = 4
_BLOCKS_AT_ONCE = 2**14


@cache
def pays(device: Device) -> bool:
    """Whether products with widened matrices are as fast or faster on `device`. Takes about a tenth of a second once.

    Results are the same to the bit: activations are rounded to 8 bits for either, and the sums are of integers.
    """
    started = time.perf_counter()
    narrow, wide = (_seconds(device, dtype) for dtype in (NARROW, WIDE))
    answer = all(b <= a for a, b in zip(narrow, wide, strict=True))
    told = ", ".join(f"{n} columns {b / a:.2f}" for n, a, b in zip(_COLUMNS, narrow, wide, strict=True))
    _LOG.info(
        "q8_0 in place of q5_0 on %s: %s of the time (measured in %.0f ms)",
        device.name,
        told,
        1e3 * (time.perf_counter() - started),
    )
    return answer


def widen(blocks: AnyArray, out: AnyArray) -> None:
    """Write (22 n,) uint8 of q5_0 as (34 n,) uint8 of q8_0."""
    source, target = blocks.reshape(-1, NARROW.type_size), out.reshape(-1, WIDE.type_size)
    for at in range(0, len(source), _BLOCKS_AT_ONCE):
        some, wide = source[at : at + _BLOCKS_AT_ONCE], target[at : at + _BLOCKS_AT_ONCE]
        low = some[:, 6:]
        fifth = np.unpackbits(some[:, 2:6], axis=1, bitorder="little")
        wide[:, :2] = some[:, :2]
        np.bitwise_and(low, 15, out=wide[:, 2:18])
        np.right_shift(low, 4, out=wide[:, 18:])
        wide[:, 2:] |= fifth << 4
        wide[:, 2:] -= 16  # as int8: -16 to 15


def _seconds(device: Device, dtype: DType) -> list[float]:
    """Return the least seconds of a product with each number of columns, on all cores."""
    matrix_arena, graphs = Arena(1), []
    matrix = matrix_arena.tensor(dtype, _SHAPE)
    with (
        Buffer.allocate(matrix_arena, device.buffer_type, "a matrix to be timed") as buffer,
        Backend(device, os.cpu_count() or 1) as backend,
    ):
        for n in _COLUMNS:
            graph = Graph(Arena(4, 4))
            columns = GraphInput(graph.arena.tensor(DType.F32, (_SHAPE[0], n), "columns"))
            graph.expand(ops.mul_mat(graph.arena, matrix, columns.tensor).as_output())
            graphs.append((graph, columns))
        found = []
        for graph, columns in graphs:
            with Sched([backend], graph.arena.graph_size, [buffer, graph.arena]) as sched:
                sched.allocate(graph)
                columns.bind()
                columns.array[...] = 1
                columns.commit()
                found.append(min(_timed(sched, graph) for _ in range(_N_RUNS)))
    return found


def _timed(sched: Sched, graph: Graph) -> float:
    started = time.perf_counter()
    sched.compute(graph)
    return time.perf_counter() - started
