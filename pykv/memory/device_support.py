"""What a device's attention takes: ggml is asked about the very nodes that a cache and its graphs consist of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from pykv.errors import UnsupportedOpError
from pykv.ggml import Arena, Device, DType, Graph, RopeParams, Tensor, ops
from pykv.memory.attention import MANY_TOKENS, AttentionParams, AttentionPath, KVView, attend
from pykv.memory.kv_settings import KV_TYPES
from pykv.memory.kv_views import Cells, Heads, by_row

HEADS: tuple[tuple[int, int], ...] = (
    *((n, n) for n in (32, 40, 64, 72, 80, 96, 112, 128, 160)),
    (192, 128),
    (192, 192),
    (256, 256),
    (320, 256),
    (512, 512),
    (576, 512),
)
"""Widths of K and V heads that models have; latent attention stores 576 and reads 512 of them as V."""

_N_CELLS, _N_HEAD, _N_HEAD_KV = 256, 4, 2


@dataclass(frozen=True)
class KVSupport:
    """What a device does itself with K and V of one type and one width of heads.

    What it does not, the CPU does, and a context warns of it: see `FallbackWarning`.

    Attributes
    ----------
    dtype : the type of both.
    head_k, head_v : elements of a head.
    flash : ggml's flash attention, for single tokens and prompts.
    matmul : attention by products; with quantised V it is not possible, so that V is f16 here then.
    set_rows : writes of rows.
    shift : moves of positions: rows read, turned and written back.
    """

    dtype: DType
    head_k: int
    head_v: int
    flash: bool
    matmul: bool
    set_rows: bool
    shift: bool


@cache
def device_support(device: Device) -> tuple[KVSupport, ...]:
    """Return what a device takes, for each type that can store K and V, and each of `HEADS` that it can store.

    Allocates nothing on the device. A device of an RPC server says yes to all, whatever its own does.
    """
    return tuple(
        _asked(device, dtype, *heads)
        for dtype in KV_TYPES
        for heads in HEADS
        if not any(n % dtype.block_size for n in heads)
    )


def _asked(device: Device, dtype: DType, head_k: int, head_v: int) -> KVSupport:
    layer = _Layer(dtype, head_k, head_v)
    return KVSupport(
        dtype,
        head_k,
        head_v,
        flash=_runs(device, layer.flash),
        matmul=_runs(device, layer.matmul),
        set_rows=_runs(device, layer.write),
        shift=_runs(device, layer.shift),
    )


def _runs(device: Device, build: Callable[[Graph], None]) -> bool:
    """Return whether every node of a graph can run on the device."""
    graph = Graph(Arena(128, 128))
    try:
        build(graph)
        graph.check_supported((device,))
    except UnsupportedOpError:
        return False
    finally:
        graph.arena.close()
    return True


@dataclass(frozen=True)
class _Layer:
    """Graphs over a small cache of one layer, without data."""

    dtype: DType
    head_k: int
    head_v: int

    def flash(self, graph: Graph) -> None:
        self._attend(graph, AttentionPath.FLASH, self.dtype)

    def matmul(self, graph: Graph) -> None:
        self._attend(graph, AttentionPath.GROUPED, DType.F16 if self.dtype.is_quantized else self.dtype)

    def write(self, graph: Graph) -> None:
        for head in (self.head_k, self.head_v):
            stored, index = self._stored(graph.arena, self.dtype, head), graph.arena.tensor(DType.I64, (2,))
            graph.expand(ops.set_rows(graph.arena, stored, graph.arena.tensor(DType.F32, (stored.ne[0], 2)), index))

    def shift(self, graph: Graph) -> None:
        arena = graph.arena
        stored, index = self._stored(arena, self.dtype, self.head_k), arena.tensor(DType.I32, (2,))
        rows = ops.get_rows(arena, stored, index)
        heads = ops.reshape(arena, rows, self.head_k, _N_HEAD_KV, 2)
        turned = ops.rope(arena, heads, arena.tensor(DType.I32, (2,)), RopeParams(min(self.head_k, 64)))
        graph.expand(ops.set_rows(arena, stored, ops.reshape(arena, turned, *rows.ne[:2]), index))

    def _attend(self, graph: Graph, path: AttentionPath, dtype_v: DType) -> None:
        arena, cells = graph.arena, Cells(_N_CELLS)
        k = by_row(arena, self._stored(arena, self.dtype, self.head_k), Heads(_N_HEAD_KV, self.head_k), cells)
        v = by_row(arena, self._stored(arena, dtype_v, self.head_v), Heads(_N_HEAD_KV, self.head_v), cells)
        for n in (1, MANY_TOKENS):
            q = arena.tensor(DType.F32, (self.head_k, _N_HEAD, n))
            mask = arena.tensor(path.mask_dtype, (_N_CELLS, n))
            graph.expand(attend(arena, path, q, KVView(k, v, False), mask, AttentionParams(1.0)))

    def _stored(self, arena: Arena, dtype: DType, head: int) -> Tensor:
        return arena.tensor(dtype, (head * _N_HEAD_KV, _N_CELLS))
