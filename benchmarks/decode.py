"""Time a prompt and single tokens at several depths, pykv against llama.cpp, both in this run.

    PYKV_ORACLE_PYTHON=/path/to/venv/bin/python python benchmarks/decode.py [--model FILE]

Each side is a process with its own model and cache; rounds go through the sides in turn and only one runs
at a time. llama.cpp takes part twice, with flash attention as it chooses (on, for the CPU) and without.
Prints one line of JSON: medians in ms, and the ratio of pykv to each peer (below 1 = pykv is faster), which
is the median over rounds of the ratio of two neighbouring measurements. Each side tells its attention path and why.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from statistics import median
from typing import Any

from peer import Peer, llama_peer, machine, model_path, pykv_peer, say

PROMPT = 512


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file; default PYKV_TEST_SMOLLM2 or the pulled SmolLM2")
    parser.add_argument("--n-ctx", type=int, default=8192, help="cells (default 8192)")
    parser.add_argument("--depths", type=int, nargs="*", default=[0, 2048, 4096, 7592], help="tokens already stored")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every side at each depth (default 7)")
    parser.add_argument("--steps", type=int, default=6, help="single tokens a turn (default 6)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    paths = ["auto", "fused", "flash", "matmul"]
    parser.add_argument("--attention", nargs="*", default=["auto"], choices=paths, help="pykv's paths (default auto)")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp: no ratios")
    return parser.parse_args()


def in_turns(peers: list[Peer], rounds: int, do: str, n: int) -> dict[str, list[float]]:
    """Return per side one number a round: the median of what `do` timed. The first turn warms up only."""
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for turn in range(rounds + 1):
        for peer in peers if turn % 2 else reversed(peers):
            answer = peer.ask(do, n=n)
            if turn:
                times[peer.name].append(median(answer) if isinstance(answer, list) else answer)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians in ms and, for each pykv side, the ratio to each other side."""
    out: dict[str, Any] = {name: round(median(values), 3) for name, values in times.items()}
    for ours in (name for name in times if name.startswith("pykv")):
        for theirs in (name for name in times if not name.startswith("pykv")):
            pairs = zip(times[ours], times[theirs], strict=True)
            out[f"{ours} / {theirs}"] = round(median(a / b for a, b in pairs), 3)
    return out


def start(stack: ExitStack, args: argparse.Namespace) -> list[Peer]:
    """Start every side, load the model and create the contexts, one after the other."""
    sides = [] if args.alone else [("llama.cpp auto", "auto"), ("llama.cpp off", "off")]
    peers = []
    for path in args.attention:
        peer = pykv_peer()
        peer.name = "pykv" if path == "auto" else f"pykv {path}"
        peers.append((stack.enter_context(peer), {"attention": path}))
    peers += [(stack.enter_context(llama_peer(name)), {"flash": flash}) for name, flash in sides]
    for peer, how in peers:
        peer.ask("load", path=model_path(args.model))
        peer.ask("context", n_ctx=args.n_ctx, n_threads=args.threads, **how)
    return [peer for peer, _ in peers]


def main() -> None:
    args = arguments()
    with ExitStack() as stack:
        peers = start(stack, args)
        result: dict[str, Any] = {"benchmark": "decode", "machine": machine(), "threads": args.threads}
        result["sides"] = {peer.name: peer.ask("about") for peer in peers}
        result[f"prompt {PROMPT}, ms"] = summary(in_turns(peers, 3, "prompt", PROMPT))
        say(f"prompt of {PROMPT}: {result[f'prompt {PROMPT}, ms']}")
        for peer in peers:
            peer.ask("clear")
        for depth in sorted(args.depths):
            for peer in peers:
                peer.ask("fill", depth=depth)
            key = f"one token at {depth}, ms"
            result[key] = summary(in_turns(peers, args.rounds, "steps", args.steps))
            say(f"{key}: {result[key]}")
        result["cores used while idle"] = {peer.name: round(peer.idle_share, 4) for peer in peers}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
