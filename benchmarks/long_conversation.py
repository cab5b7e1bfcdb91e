"""Hold one conversation up to the last cell, and watch what the memory takes. Needs a model with windows.

    python benchmarks/long_conversation.py [--model FILE] [--n-ctx 32768] [--swa-full]

Prompts with some single tokens after each, until the context is full; before, one prompt at full depth that is
forgotten, so that all that was reserved has been touched. Prints one line of JSON: the bytes of the memory and of its
window cache, against what the same layers take with `swa_full`; and at several depths the process's resident memory and
the tokens a second since the depth before, of prompts and of single tokens.
It fails if the memory or the process grows by more than `SLACK_MIB`, or if the window cache ever holds more cells than
it has or lacks what the window shows.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bookkeeping import run_of
from peer import machine, model_path, say, timed, tokens

import pykv

SLACK_MIB = 2
"""What the process may grow by after the first depth: figures and pieces of Python."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file; default PYKV_TEST_GEMMA3 or the pulled Gemma 3")
    parser.add_argument("--n-ctx", type=int, default=32768, help="tokens of the conversation (default 32768)")
    parser.add_argument("--depths", type=int, nargs="*", default=[1024, 4096, 8192, 16384, 32768])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt (default 512)")
    parser.add_argument("--singles", type=int, default=12, help="single tokens after each (default 12)")
    parser.add_argument("--swa-full", action="store_true", help="keep all tokens in the layers with a window too")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def turns(n: int, prompt: int, singles: int) -> Iterator[int]:
    """Yield how many tokens each decode takes, `n` in all."""
    while n > 0:
        for size in (prompt, *[1] * singles):
            if n > 0:
                yield min(size, n)
            n -= size


def resident() -> dict[str, float]:
    """Return the process's memory in MiB, and the part of it that is no file; Linux only, else nothing."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("Rss", "VmRSS")))
    kib = {name: int(value.split()[0]) for name, value in fields.items()}
    return {"rss_mib": round(kib["VmRSS"] / 1024, 1), "anonymous_mib": round(kib["RssAnon"] / 1024, 1)} if kib else {}


def warm_up(ctx: pykv.Context) -> None:
    """Decode as much as is computed at once in the last cells, over cells that are only booked, and forget it.

    Afterwards all memory that was reserved has been touched, so that none of it becomes resident later.
    """
    n = ctx.params.n_ubatch
    for part in ctx.memory.parts:
        for start in range(ctx.n_ctx - min(part.n_cells, ctx.n_ctx), ctx.n_ctx - n, n):
            ubatch = run_of(start, min(n, ctx.n_ctx - n - start))
            slot = part.streams.find_slot(ubatch)
            assert slot is not None
            part.streams.apply(slot, ubatch)
    ctx.decode(pykv.Batch(tokens(n), logits="last"))
    ctx.memory.clear()


@dataclass
class Watch:
    """What a conversation took, checked after every decode."""

    ctx: pykv.Context
    nbytes: int
    n_used_most: int = 0
    ms: dict[str, list[float]] = field(default_factory=lambda: {"prompt": [], "single": []})
    n: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "single": 0})

    def decode(self, said: list[int]) -> None:
        """Decode some tokens, and hold the memory against what it had."""
        kind = "single" if len(said) == 1 else "prompt"
        self.ms[kind].append(timed(lambda: self.ctx.decode(pykv.Batch(said, logits="last"))))
        self.n[kind] += len(said)
        memory = self.ctx.memory
        assert memory.nbytes == self.nbytes, "the memory has grown"
        cells = memory.swa.cells()
        self.n_used_most = max(self.n_used_most, int(cells.n_used))
        assert self.n_used_most <= cells.n, "more cells are in use than the window cache has"
        end = memory.pos_max(0) + 1
        first = max(0, int(memory.spec.window.span(end)[0]))
        held = cells.pos[cells.owners[0]]
        assert np.count_nonzero(held >= first) == end - first, "the window cache lacks what the window shows"

    def at(self, depth: int) -> dict[str, Any]:
        """Return the figures since the last call."""
        found: dict[str, Any] = {"tokens": depth} | resident() | {"memory_nbytes": self.ctx.memory.nbytes}
        for kind, ms in self.ms.items():
            found[f"{kind}_tokens_per_s"] = round(1e3 * self.n[kind] / sum(ms), 1) if ms else None
            self.n[kind] = 0
            ms.clear()
        return found


def converse(ctx: pykv.Context, args: argparse.Namespace) -> tuple[Watch, list[dict[str, Any]]]:
    """Fill the context, and return the figures at each depth."""
    watch, rows, depth = Watch(ctx, ctx.memory.nbytes), [], 0
    depths = sorted(d for d in args.depths if d <= args.n_ctx)
    for n in turns(args.n_ctx, args.prompt, args.singles):
        watch.decode(tokens(n, depth) if n > 1 else [int(ctx.logits[-1].argmax())])
        depth += n
        if depths and depth >= depths[0]:
            depths.pop(0)
            rows.append(watch.at(depth))
            say(str(rows[-1]))
    grown = rows[-1].get("anonymous_mib", 0) - rows[0].get("anonymous_mib", 0) if rows else 0
    assert grown <= SLACK_MIB, f"the process has grown by {grown} MiB"
    return watch, rows


def main() -> None:
    args = arguments()
    params = {"n_ctx": args.n_ctx, "n_threads": args.threads, "n_outputs_max": 1}
    with pykv.Model.load(model_path(args.model, "PYKV_TEST_GEMMA3", "gemma3-270m")) as model:
        plans = {full: model.memory_plan(**params, swa_full=full).parts for full in (False, True)}
        if "swa" not in plans[True]:
            raise SystemExit("the model has no layers with a window beside others without")
        result: dict[str, Any] = {"benchmark": "long conversation", "machine": machine(), "threads": args.threads}
        result |= {
            "swa_full": args.swa_full,
            "without_window_nbytes": plans[True]["base"].nbytes,
            "window_nbytes": plans[args.swa_full]["swa"].nbytes,
            "window_nbytes_if_full": plans[True]["swa"].nbytes,
        }
        with model.context(**params, swa_full=args.swa_full) as ctx:
            warm_up(ctx)
            say(f"warm: {resident()}")
            watch, result["depths"] = converse(ctx, args)
            result |= {"memory_nbytes": ctx.memory.nbytes, "compute_nbytes": ctx.compute_nbytes}
            result |= {"window_cells": ctx.memory.swa.n_cells, "window_cells_used_most": watch.n_used_most}
            path = ctx.attention_path
            result["paths"] = {"generation": path.generation, "prompts": path.prompts}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
