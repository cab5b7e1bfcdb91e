"""Which attention path is fastest on a device, found by running each. Cached in the process.

No table of models or machines: kernels change with every version of ggml.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from pykv.errors import PykvError
from pykv.ggml import Arena, Backend, Buffer, Device, DType, Graph, GraphInput, Sched, cpu_device
from pykv.log import logger
from pykv.memory.attention import MANY_TOKENS, AttentionParams, AttentionPath, AttentionPlan, KVView, attend
from pykv.memory.attention_choice import AttentionChoice
from pykv.memory.kv_views import Cells, Heads, by_channel, by_row

_LOG = logger(__name__)

DEPTHS = (1024, 4096, 16384)
"""Cells at which one token is timed. Below, each path takes little and what the graph around them costs decides."""
MANY_DEPTHS = (512, 2048)
"""Cells at which a prompt is timed: deeper only while `FUSED` is not worth it. `MANY_TOKENS` stand for every length.

Measured by benchmarks/prompts.py over 0 to 32768 cells, f16, AVX2: `GROUPED` takes 3.2 to 1.1 times as long as `FLASH`,
never less; 64 tokens and 512 agree on the faster one, and so do V in rows and transposed. `FUSED` gains on the others
as there are more cells.
"""
N_ROUNDS = 4
HOPELESS = 3
"""A path that takes so many times the fastest one's time is not tried deeper."""
WORTH_IT = 0.9
"""Share of another path's time that one must stay below to be preferred at some cost: to turn V, or for noise."""
NEVER = float("inf")

_Times = dict[AttentionPath, float]


@dataclass(frozen=True)
class ProbeShape:
    """One attention layer, as it will be used; `n_cells` is what a stream holds."""

    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_cells: int
    type_k: DType
    type_v: DType


@cache
def measured_choice(device: Device, n_threads: int, shape: ProbeShape, may_fuse: bool) -> AttentionChoice:
    """Return the plan that answers soonest. Takes about a tenth of a second the first time.

    Transposed V is worth its while from the depth on at which a token comes sooner with it. `may_fuse` tells whether
    the fused path is tried.
    """
    started = time.perf_counter()
    paths = [path for path in AttentionPath if may_fuse or path is not AttentionPath.FUSED]
    bench = _Bench(device, n_threads, shape)
    single = _single(bench, shape.n_cells, paths)
    many = _many(bench, shape.n_cells, paths)
    rows, prompts = _rows(single), many[MANY_DEPTHS[0]]
    least = min((path for path in prompts if path is not AttentionPath.FUSED), key=lambda path: prompts[path])
    plan = AttentionPlan(least, _transpose_from(single, rows, shape.n_cells), rows, _fuse_from(many))
    deepest = max(single)
    reason = f"measured at {min(deepest, shape.n_cells)} cells: {_listed(single[deepest])}; {_listed_many(many, shape)}"
    if single[DEPTHS[0]].get(AttentionPath.FLASH) == NEVER:
        reason += f"; flash does not run on {device.name}"
    _LOG.info(
        "attention on %s: %s; V transposed from %s cells on, prompts fused from %s on (took %.0f ms)",
        device.name,
        reason,
        plan.transpose_from,
        plan.fuse_from,
        1e3 * (time.perf_counter() - started),
    )
    return AttentionChoice(plan, reason)


@contextmanager
def _opened(device: Device, n_threads: int) -> Iterator[list[Backend]]:
    devices = (device,) if device.kind == "cpu" else (device, cpu_device())
    backends = [Backend(each, n_threads) for each in devices]
    try:
        yield backends
    finally:
        for backend in backends:
            backend.close()


def _many(bench: _Bench, n_cells: int, paths: list[AttentionPath]) -> dict[int, _Times]:
    """Return for each depth what a prompt took over V in rows."""
    found: dict[int, _Times] = {}
    for depth in MANY_DEPTHS:
        if found and depth > n_cells:
            break
        times = {path: bench.seconds(path, False, MANY_TOKENS, depth) for path in paths}
        found[depth] = times
        fused = times.get(AttentionPath.FUSED, NEVER)
        if fused == NEVER or _is_worth_it(times) or fused >= HOPELESS * min(times.values()):
            break
        paths = [path for path in paths if times[path] < NEVER]
    return found


def _is_worth_it(times: _Times) -> bool:
    """Return whether the fused path is clearly faster than the others."""
    others = min(seconds for path, seconds in times.items() if path is not AttentionPath.FUSED)
    return times.get(AttentionPath.FUSED, NEVER) < WORTH_IT * others


def _fuse_from(many: dict[int, _Times]) -> int | None:
    """Return the least depth at which a prompt is faster by the fused path."""
    for depth, times in many.items():
        if _is_worth_it(times):
            return 0 if depth == MANY_DEPTHS[0] else depth
    return None


def _single(bench: _Bench, n_cells: int, paths: list[AttentionPath]) -> dict[int, _Times]:
    """Return for each depth what one token took; the paths without hope drop out on the way."""
    found: dict[int, _Times] = {}
    for depth in DEPTHS:
        if depth > DEPTHS[0] and (depth > n_cells or len(paths) == 1):
            break
        times = {path: bench.seconds(path, path is AttentionPath.GROUPED, 1, depth) for path in paths}
        _LOG.info("one token over %d cells: %s", min(depth, n_cells), _listed(times))
        paths = [path for path in paths if times[path] < HOPELESS * min(times.values())] or paths[:1]
        found[depth] = times
    return found


def _rows(single: dict[int, _Times]) -> AttentionPath:
    """Return the path over V in rows, `FUSED` unless the other one is clearly faster at the greatest depth."""
    fused, flash = AttentionPath.FUSED, AttentionPath.FLASH
    depth = max(d for d, times in single.items() if fused in times or flash in times)
    times = single[depth]
    if times.get(fused, NEVER) == NEVER:
        return flash
    return flash if times.get(flash, NEVER) < WORTH_IT * times[fused] else fused


def _transpose_from(single: dict[int, _Times], rows: AttentionPath, n_cells: int) -> int | None:
    """Return the least depth at which one token is faster over transposed V, 0 if no other path runs.

    Where none runs at all, as with quantised V that a device cannot read, V stays in rows: the CPU attends, and whoever
    makes the context is warned.
    """
    if single[DEPTHS[0]][rows] == NEVER:
        return 0 if single[DEPTHS[0]].get(AttentionPath.GROUPED, NEVER) < NEVER else None
    for depth, times in single.items():
        if depth <= n_cells and times.get(AttentionPath.GROUPED, NEVER) < WORTH_IT * times.get(rows, NEVER):
            return depth
    return None


def _listed(times: _Times) -> str:
    return ", ".join(f"{path.value} {1e3 * seconds:.2f} ms" for path, seconds in times.items() if seconds < NEVER)


def _listed_many(many: dict[int, _Times], shape: ProbeShape) -> str:
    depth, times = max(many.items(), key=lambda item: item[0])
    return f"{MANY_TOKENS} tokens over {min(depth, shape.n_cells)} cells: {_listed(times)}"


class _Bench:
    """Runs one layer of attention over made-up cells."""

    def __init__(self, device: Device, n_threads: int, shape: ProbeShape) -> None:
        self._device, self._n_threads, self._shape = device, n_threads, shape

    def seconds(self, path: AttentionPath, v_trans: bool, n_tokens: int, n_kv: int) -> float:
        """Return the least seconds that a layer took, infinity where the path does not run."""
        if path is AttentionPath.GROUPED and self._shape.type_v.is_quantized:
            return NEVER
        try:
            return self._run(path, v_trans, n_tokens, min(n_kv, self._shape.n_cells))
        except PykvError as error:
            _LOG.info("attention path %s does not run on %s: %s", path.value, self._device.name, error)
            return NEVER

    def _run(self, path: AttentionPath, v_trans: bool, n_tokens: int, n_kv: int) -> float:
        stored, graph = Arena(2), Graph(Arena(64, 64))
        arena, shape = graph.arena, self._shape
        q = GraphInput(arena.tensor(DType.F32, (shape.n_embd_head_k, shape.n_head, n_tokens), "q"))
        mask = GraphInput(arena.tensor(path.mask_dtype, (n_kv, n_tokens), "mask"))
        kv = self._cells(stored, arena, n_kv, v_trans)
        out = attend(arena, path, q.tensor, kv, mask.tensor, AttentionParams(1.0))
        graph.expand(out.as_output())
        graph.check_supported((self._device,))
        # note: a backend must not outlive what it has computed over; llvmpipe's died at the next graph where it did
        with (
            Buffer.allocate(stored, self._device.buffer_type, "attention probe") as buffer,
            _opened(self._device, self._n_threads) as backends,
        ):
            buffer.mark_weights()  # holds the computation on this device
            with Sched(backends, arena.graph_size, [buffer, arena]) as sched:
                sched.allocate(graph)
                return min(self._round(sched, graph, (q, mask)) for _ in range(N_ROUNDS))

    def _round(self, sched: Sched, graph: Graph, inputs: tuple[GraphInput, ...]) -> float:
        for one in inputs:
            one.bind()
            one.array.fill(0)
            one.commit()
        started = time.perf_counter()
        sched.compute(graph)
        return time.perf_counter() - started

    def _cells(self, stored: Arena, arena: Arena, n_kv: int, v_trans: bool) -> KVView:
        """Return views of made-up K and V in a cache of `n_kv` cells."""
        shape, cells = self._shape, Cells(n_kv)
        k_heads, v_heads = (Heads(shape.n_head_kv, n) for n in (shape.n_embd_head_k, shape.n_embd_head_v))
        k = stored.tensor(shape.type_k, (k_heads.n * k_heads.width, n_kv), "k")
        v = stored.tensor(shape.type_v, (v_heads.n * v_heads.width, n_kv), "v")
        v_view = (by_channel if v_trans else by_row)(arena, v, v_heads, cells)
        return KVView(by_row(arena, k, k_heads, cells), v_view, v_trans)
