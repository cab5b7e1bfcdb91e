"""Time what pykv does outside ggml's compute: slots, cells, masks, graph inputs, rows of logits.

    python benchmarks/bookkeeping.py [--model FILE]

A step's bookkeeping is the time of making a batch, of `decode` and of reading the row, less the time inside
`Sched.compute`. The cells are filled by bookkeeping alone, because what is in the tensors changes none of
these times. At 4096 cells the share of a whole step is given; at 262144 compute is left out. Prints one line
of JSON, times in us.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
from peer import machine, model_path, say

import pykv
from pykv.batch.ubatch import UBatch
from pykv.cells import CellStreams, MaskRule, fill_mask
from pykv.ggml.sched import Sched


class ComputeClock:
    """Stands in for `Sched.compute`: adds up its time in seconds, or leaves the work out."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self.spent = 0.0
        self.leaves_out = False
        self._compute = compute

    def __call__(self, sched: Sched, *args: Any) -> None:
        if self.leaves_out:
            return
        begin = time.perf_counter()
        self._compute(sched, *args)
        self.spent += time.perf_counter() - begin


@contextmanager
def compute_clock() -> Iterator[ComputeClock]:
    """Time every scheduler's compute calls while the context lasts."""
    original = Sched.compute
    clock = ComputeClock(original)

    def timed(sched: Sched, *args: Any) -> None:  # a plain function, so that it binds like a method
        clock(sched, *args)

    Sched.compute = timed  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        Sched.compute = original  # type: ignore[method-assign]


def run_of(start: int, n: int) -> UBatch:
    """Return n tokens of sequence 0 at the positions from `start` on."""
    return UBatch(
        token=np.zeros(n, np.int32),
        embd=None,
        pos=np.arange(start, start + n, dtype=np.int32)[None],
        seq_ids=((0,),) * n,
        seq_first=np.zeros(n, np.int32),
        seq_id_unq=(0,),
        output=np.zeros(n, np.bool_),
        batch_idxs=np.arange(n, dtype=np.int32),
        n_seqs=n,
        equal_seqs=False,
    )


def fill_cells(streams: CellStreams, depth: int) -> None:
    """Book `depth` tokens of sequence 0."""
    for start in range(0, depth, 2048):
        ubatch = run_of(start, min(2048, depth - start))
        slot = streams.find_slot(ubatch)
        assert slot is not None, "the cache is too small"
        streams.apply(slot, ubatch)


def steps(ctx: pykv.Context, clock: ComputeClock, n: int) -> dict[str, float]:
    """Return medians over n single tokens, each at the same depth."""
    depth, whole, rest = ctx.memory.pos_max(0) + 1, [], []
    for i in range(n + 5):
        clock.spent, begin = 0.0, time.perf_counter()
        ctx.decode(pykv.Batch([100 + i]))
        row = ctx.logits[-1]
        elapsed = time.perf_counter() - begin
        assert row.ndim == 1
        ctx.memory.seq_rm(0, depth, -1)
        if i >= 5:  # the first ones build the graph
            whole.append(elapsed)
            rest.append(elapsed - clock.spent)
    result = {"step": round(median(whole) * 1e6, 1), "bookkeeping": round(median(rest) * 1e6, 1)}
    if not clock.leaves_out:
        result["share"] = round(median(r / w for r, w in zip(rest, whole, strict=True)), 4)
    return result


def one_token(model: pykv.Model, clock: ComputeClock, n_cells: int, threads: int, compute: bool) -> dict[str, float]:
    """Measure steps in a nearly full cache."""
    wide: dict[str, Any] = {} if compute else {"type_k": "q4_0", "type_v": "q4_0", "n_ubatch": 32}
    flash = "auto" if compute else True
    with model.context(n_ctx=n_cells, flash_attn=flash, n_threads=threads, **wide) as ctx:
        fill_cells(ctx.memory.streams, n_cells - 64)
        clock.leaves_out = not compute
        return steps(ctx, clock, 60 if compute else 200)


def prompt_ubatch(n_cells: int = 32768, n: int = 512, rounds: int = 15) -> dict[str, float]:
    """Time search, apply and mask of n tokens behind n_cells - n stored ones; medians in us."""
    streams, times = CellStreams(n_cells), []
    fill_cells(streams, n_cells - n)
    ubatch, out = run_of(n_cells - n, n), np.empty((1, n, n_cells), np.float16)
    for _ in range(rounds):
        marks = [time.perf_counter()]
        slot = streams.find_slot(ubatch)
        assert slot is not None
        marks.append(time.perf_counter())
        streams.apply(slot, ubatch)
        marks.append(time.perf_counter())
        fill_mask(out, streams, slot, ubatch, MaskRule())
        marks.append(time.perf_counter())
        times.append(np.diff(marks))
        streams.seq_rm(0, n_cells - n, -1)
    parts = np.median(np.array(times), axis=0) * 1e6
    return {
        name: round(float(t), 1)
        for name, t in zip(("search", "apply", "mask", "all"), [*parts, parts.sum()], strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file; default PYKV_TEST_SMOLLM2 or the pulled SmolLM2")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "bookkeeping", "machine": machine(), "threads": args.threads}
    result["512 tokens in 32768 cells, us"] = prompt_ubatch()
    say(f"512 tokens in 32768 cells: {result['512 tokens in 32768 cells, us']}")
    with pykv.Model.load(model_path(args.model)) as model, compute_clock() as clock:
        for n_cells, compute in ((4096, True), (262144, False)):
            key = f"one token in {n_cells} cells, us"
            result[key] = one_token(model, clock, n_cells, args.threads, compute)
            say(f"{key}: {result[key]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
