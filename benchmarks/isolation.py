"""Time single tokens of a model in a process of its own and of one in this process, token by token in turns.

    python benchmarks/isolation.py [--model FILE] [--threads 1 2] [--rounds 300] [--clock cpu]

A token is made into a batch, decoded, and the most likely next one is looked up: what a program's loop does. Prints one
line of JSON a number of threads: medians in ms, and what isolation adds to a token, in percent, as the median over
rounds of the ratio of two neighbours; besides, what the same costs where there is nothing to compute: a position that
is asked for. Where other programs use the machine too, each handing over waits for a core, which says nothing about
isolation: ``--clock cpu`` then, the time that both processes were on a core (Linux).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from peer import machine, model_path

import pykv


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file; default PYKV_TEST_SMOLLM2 or the pulled SmolLM2")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads that compute (default 1 2)")
    parser.add_argument("--rounds", type=int, default=300, help="tokens of each side (default 300)")
    parser.add_argument("--attention", default="fused", choices=["fused", "flash", "matmul"])
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    return parser.parse_args()


def on_core(pid: int) -> float:
    """Return the seconds that all threads of a process were on a core."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def step(ctx: pykv.Context, clock: Callable[[], float]) -> float:
    """Decode one token; return the ms that it took."""
    begin = clock()
    ctx.decode(pykv.Batch([200]))
    ctx.logits[-1].argmax()
    return (clock() - begin) * 1e3


def question(ctx: pykv.Context, clock: Callable[[], float]) -> float:
    """Ask for a position; return the ms that it took."""
    begin = clock()
    ctx.memory.pos_max(0)
    return (clock() - begin) * 1e3


def measure(here: pykv.Context, there: pykv.Context, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Let both sides take turns, each first in every other round."""
    times: dict[str, list[float]] = {"here": [], "there": [], "ask": []}
    for i in range(rounds + 20):
        for name, ctx in (("here", here), ("there", there))[:: 1 if i % 2 else -1]:
            times[name].append(step(ctx, clock))
        times["ask"].append(question(there, clock))
        if i % 100 == 99:  # the same depth on both sides, and never a deep one
            here.memory.clear()
            there.memory.clear()
    warm = {name: values[20:] for name, values in times.items()}
    ratio = median(a / b for a, b in zip(warm["there"], warm["here"], strict=True))
    return {
        "in this process, ms": round(median(warm["here"]), 3),
        "isolated, ms": round(median(warm["there"]), 3),
        "added %": round(100 * (ratio - 1), 2),
        "a question, ms": round(median(warm["ask"]), 3),
    }


def main() -> None:
    args = arguments()
    path = model_path(args.model)
    with (
        pykv.Model.load(path, "CPU", isolate=False) as here,
        pykv.Model.load(path, "CPU", isolate=True) as there,
    ):
        pid = there.link.pid
        clock = time.perf_counter if args.clock == "wall" else lambda: time.process_time() + on_core(pid)
        for n in args.threads:
            params = {"n_ctx": 512, "n_threads": n, "attention": args.attention}
            with here.context(**params) as one, there.context(**params) as other:
                print(json.dumps({"threads": n, **measure(one, other, args.rounds, clock), **machine()}))


if __name__ == "__main__":
    main()
