"""Time the memory verbs in nearly full caches, pykv against llama.cpp, both in this run.

    PYKV_ORACLE_PYTHON=/path/to/venv/bin/python python benchmarks/verbs.py [--model FILE]

Needs the gguf package. Each side is a process with its own model and cache; rounds go through the sides in turn.
Verbs change bookkeeping alone, so they are timed on a model of one tiny layer, in a unified cache:

    seq_cp      sequence 0, all but the whole cache, to sequence 1
    seq_rm      that copy
    seq_keep    sequence 0, where another shares half its cells and a third one has 16
    seq_add     positions of the later half of sequence 0
    tail_rm     seq_rm of the last token, decoded just before

llama.cpp's calls go through ctypes and are timed inside its process; "empty call" says what of it is ctypes.
To fill 250,000 cells token by token would take days: llama.cpp restores a state made by hand, pykv books tokens
without computing them. K and V are zeros on both sides, which takes no less time to turn.

The K-shift of the later half is timed on the real model. pykv's time is that of `memory.update()`. llama.cpp has no
call of its own for it: its time is what a decode of one token takes longer with a shift pending than without.

Prints one line of JSON: medians in us (the K-shift in ms), and the ratio of pykv to llama.cpp (below 1 = pykv is
faster), which is the median over rounds of the ratio of two neighbouring measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from decode import in_turns
from peer import Peer, llama_peer, machine, model_path, pykv_peer, say
from tiny_model import write_tiny_model

VERBS = ("seq_cp", "seq_rm", "seq_keep", "seq_add", "tail_rm")
SIZES = ((8192, 7600, 9), (262144, 250000, 2))
"""Cells, how many of them sequence 0 holds, and calls a turn."""


def summary(times: dict[str, list[float]], scale: float = 1e3) -> dict[str, float]:
    """Return medians, by default in us, and the ratio of pykv to llama.cpp."""
    out = {name: round(median(values) * scale, 2) for name, values in times.items()}
    out["ratio"] = round(median(a / b for a, b in zip(times["pykv"], times["llama.cpp"], strict=True)), 4)
    return out


def open_context(peers: list[Peer], model: str, n_ctx: int, depth: int, threads: int) -> None:
    """Give every side the model and a cache in which sequence 0 holds `depth` cells."""
    for peer in peers:
        peer.ask("load", path=model)
        peer.ask("context", n_ctx=n_ctx, n_threads=threads, flash="on", n_ubatch=32)
        peer.ask("book", depth=depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file for the K-shift; default PYKV_TEST_SMOLLM2 or the pulled SmolLM2")
    parser.add_argument("--only", nargs="*", default=[*VERBS, "k_shift"], choices=[*VERBS, "k_shift"])
    parser.add_argument("--rounds", type=int, default=9, help="turns of every side at each verb (default 9)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "verbs", "machine": machine(), "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder, pykv_peer() as ours, llama_peer("llama.cpp") as theirs:
        peers = [ours, theirs]
        result["sides"] = {peer.name: peer.ask("about") for peer in peers}
        tiny = str(write_tiny_model(Path(folder) / "tiny.gguf", n_ctx=SIZES[-1][0]))
        for n_cells, depth, n in SIZES:
            open_context(peers, tiny, n_cells, depth, args.threads)
            key = f"{depth} of {n_cells} cells, us"
            overhead = {peer.name: round(peer.ask("call_overhead", n=1000) * 1e3, 2) for peer in peers}
            result[key] = {"empty call": overhead}
            for verb in (verb for verb in VERBS if verb in args.only):
                result[key][verb] = summary(in_turns(peers, args.rounds, verb, n))
                say(f"{key}: {verb} {result[key][verb]}")
        if "k_shift" in args.only:
            n_cells, depth, _ = SIZES[0]
            open_context(peers, model_path(args.model), n_cells, depth, args.threads)
            key = f"K-shift of {depth // 2} of {n_cells} cells, ms"
            result[key] = summary(in_turns(peers, args.rounds, "k_shift", 2), scale=1)
            say(f"{key}: {result[key]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
