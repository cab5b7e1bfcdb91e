"""Time single tokens with and without an observer of attention, in turns on one context.

    python benchmarks/observe.py [--model FILE] [--depth 7592] [--attention fused] [--clock cpu --threads 1]

The cells are booked, not computed: their keys and values are zeros, which costs attention the same.
Prints one line of JSON: medians in ms, and what observing adds to a step, in percent: the median over rounds of the
ratio of two neighbouring measurements. The observations are taken out, as a policy would.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median
from typing import Any

from bookkeeping import fill_cells
from peer import machine, model_path

import pykv
from pykv import AttentionMass

SIDES: dict[str, dict[str, Any] | None] = {
    "not observed": None,
    "one layer": {"layers": [0]},
    "all layers": {},
    "all layers, per KV head": {"what": AttentionMass(per_kv_head=True)},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file; default PYKV_TEST_SMOLLM2 or the pulled SmolLM2")
    parser.add_argument("--depth", type=int, default=7592, help="tokens already stored (default 7592)")
    parser.add_argument("--attention", default="auto", choices=["auto", "fused", "flash", "matmul"])
    parser.add_argument("--rounds", type=int, default=9, help="turns of every side (default 9)")
    parser.add_argument("--steps", type=int, default=6, help="single tokens a turn (default 6)")
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"], help="cpu: where others use the machine too"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def step(ctx: pykv.Context, args: argparse.Namespace, observer: Any) -> float:
    """Time one token at a depth, and the taking out of what was observed; in ms."""
    clock = CLOCKS[args.clock]
    begin = clock()
    ctx.decode(pykv.Batch([200]))
    for seen in observer or ():
        assert seen.mass
    ms = (clock() - begin) * 1e3
    ctx.memory.seq_rm(0, args.depth, -1)
    return ms


def turn(ctx: pykv.Context, args: argparse.Namespace, observed: dict[str, Any] | None) -> float:
    """Return the median of some steps; the first one builds the graph and does not count."""
    observer = None if observed is None else ctx.observe(**observed)
    times = [step(ctx, args, observer) for _ in range(args.steps + 1)][1:]
    if observer is not None:
        observer.close()
    return median(times)


def measure(ctx: pykv.Context, args: argparse.Namespace) -> dict[str, Any]:
    """Go through the sides in turn; the first round only warms up."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for i in range(args.rounds + 1):
        for side in SIDES if i % 2 else reversed(SIDES):
            ms = turn(ctx, args, SIDES[side])
            if i:
                times[side].append(ms)
    out: dict[str, Any] = {f"{side}, ms": round(median(values), 3) for side, values in times.items()}
    base = times["not observed"]
    for side in list(SIDES)[1:]:
        ratio = median(a / b for a, b in zip(times[side], base, strict=True))
        out[f"{side}, added %"] = round(100 * (ratio - 1), 1)
    return out


def main() -> None:
    args = arguments()
    with pykv.Model.load(model_path(args.model)) as model:
        n_ctx = args.depth + 256
        with model.context(n_ctx=n_ctx, n_threads=args.threads, attention=args.attention) as ctx:
            fill_cells(ctx.memory.streams, args.depth)
            asked = {"threads": args.threads, "depth": args.depth, "clock": args.clock}
            result = {"benchmark": "observe", "machine": machine(), **asked}
            result |= measure(ctx, args)
            result["path"] = ctx.attention_path.generation
    print(json.dumps(result))


if __name__ == "__main__":
    main()
