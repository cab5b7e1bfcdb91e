"""Time attention of a prompt over cells already there, path by path.

    python benchmarks/prompts.py [--threads N] [--tokens 512 64] [--cells 0 2048 8192 16384 32768]
                                 [--shapes 9/3/64 32/8/128] [--types f16 q8_0]

The new tokens see all those cells and, of their own, the ones up to themselves. Paths go in turns, all in this run.
`turned` stands for a path over transposed V. Prints one line of JSON: medians in ms a layer, and medians over rounds of
the ratio to flash.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from attention import Shape, made_up, new_cells
from numpy.typing import NDArray
from peer import machine, say

from pykv.ggml import Arena, Backend, Buffer, DType, Graph, GraphInput, Sched, cpu_device, ops
from pykv.memory.attention import AttentionParams, AttentionPath, attend

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BESIDE_FLASH = ["matmul", "matmul turned", "flash turned", "fused"]


@dataclass(frozen=True)
class Side:
    """A path, over V in rows or transposed."""

    path: AttentionPath
    v_trans: bool = False

    def __str__(self) -> str:
        return self.path.value + (" turned" if self.v_trans else "")


def sides(shape: Shape, names: list[str]) -> list[Side]:
    """Return those that can serve a prompt: flash first; blocks cannot be transposed."""
    found = [Side(AttentionPath.FLASH), Side(AttentionPath.FUSED)]
    if not shape.dtype.is_quantized:
        found += [Side(AttentionPath.GROUPED), Side(AttentionPath.GROUPED, True), Side(AttentionPath.FLASH, True)]
    return [side for side in found if str(side) in ("flash", *names)]


class Prompt:
    """K and V of one layer, and a graph in which a prompt attends to them."""

    def __init__(self, stack: ExitStack, shape: Shape, side: Side, n_tokens: int, n_threads: int) -> None:
        stored, graph = Arena(2), Graph(Arena(64, 64))
        arena, n = graph.arena, n_tokens
        q = GraphInput(arena.tensor(DType.F32, (shape.head, shape.n_head, n), "q"))
        mask = GraphInput(arena.tensor(side.path.mask_dtype, (shape.n_kv, n), "mask"))
        kv, tensors = new_cells(stored, arena, shape, side.v_trans)
        out = attend(arena, side.path, q.tensor, kv, mask.tensor, AttentionParams(shape.head**-0.5))
        graph.expand(out.as_output())
        cpu = cpu_device()
        buffer = stack.enter_context(Buffer.allocate(stored, cpu.buffer_type, "cells"))
        for tensor in tensors:
            buffer.adopt(tensor).set(made_up(shape))
        backend = stack.enter_context(Backend(cpu, n_threads))
        self._sched = stack.enter_context(Sched([backend], arena.graph_size, [buffer, arena]))
        self._sched.allocate(graph)
        queries = np.random.default_rng(0).standard_normal((n, shape.n_head, shape.head))
        self._inputs = [(q, queries), (mask, causal(shape.n_kv, n_tokens))]
        self._graph = graph

    def seconds(self, clock: Callable[[], float]) -> float:
        """Return what the layer takes."""
        for one, values in self._inputs:  # their memory serves other tensors once they were read
            one.bind()
            one.array[...] = values
            one.commit()
        begin = clock()
        self._sched.compute(self._graph)
        return clock() - begin


def causal(n_kv: int, n_tokens: int) -> NDArray[np.float32]:
    """Return the mask (n_tokens, n_kv) of tokens that took the last cells."""
    hidden = np.arange(n_kv) > np.arange(n_kv - n_tokens, n_kv)[:, None]
    return np.where(hidden, -np.inf, 0).astype(np.float32)


def measure(shape: Shape, n_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return medians in ms a layer and ratios to flash."""
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        chosen = sides(shape, args.paths)
        prompts = {str(side): Prompt(stack, shape, side, n_tokens, args.threads) for side in chosen}
        for turn in range(args.rounds + 1):
            for name, one in prompts.items():
                seconds = one.seconds(CLOCKS[args.clock])
                if turn:  # the first turn warms up only
                    times.setdefault(name, []).append(seconds)
    return _summary(times)


def _summary(times: dict[str, list[float]]) -> dict[str, Any]:
    out: dict[str, Any] = {name: round(1e3 * median(values), 1) for name, values in times.items()}
    flash = times[AttentionPath.FLASH.value]
    for name, values in times.items():
        if values is not flash:
            out[f"{name} / flash"] = round(median(a / b for a, b in zip(values, flash, strict=True)), 2)
    return out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["9/3/64", "32/8/128"], help="query heads/KV heads/width")
    parser.add_argument("--cells", type=int, nargs="*", default=[0, 2048, 8192, 16384, 32768], help="already there")
    parser.add_argument("--tokens", type=int, nargs="*", default=[512], help="new ones")
    parser.add_argument("--types", nargs="*", default=["f16", "q8_0"], help="of K and V")
    parser.add_argument("--paths", nargs="*", default=BESIDE_FLASH, choices=BESIDE_FLASH, help="beside flash")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--clock", default="wall", choices=CLOCKS, help="cpu: where others use the machine too, with one thread"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    result: dict[str, Any] = {"benchmark": "prompts", "machine": machine(), "threads": args.threads}
    result["clock"], result["kernel"] = args.clock, ops.fused_isa()
    for text in args.shapes:
        heads = Shape(*map(int, text.split("/")), 0, DType.F16)
        for n_tokens in args.tokens:
            for depth in args.cells:
                for label in args.types:
                    dtype = DType.parse(label, "types")
                    shape = replace(heads, n_kv=depth + n_tokens, dtype=dtype, n_rows=n_tokens)
                    key = f"over {depth}: {shape}, ms a layer"
                    result[key] = measure(shape, n_tokens, args)
                    say(f"{key}: {result[key]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
