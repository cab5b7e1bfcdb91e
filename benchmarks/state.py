"""Time saving and loading one long sequence, pykv against llama.cpp and against a plain copy of the same bytes.

    PYKV_ORACLE_PYTHON=/path/to/venv/bin/python python benchmarks/state.py [--model FILE] [--depth 7633] [--folder DIR]

Both sides hold a sequence of `depth` tokens, booked without computing, and get, set, save and load its state in turns.
pykv waits until a saved file is on the disk and adds checksums, which it compares when it loads; llama.cpp does
neither. So its files are timed also with an fsync behind them, and `plain write` is the same bytes written; `synced`
is until they are on the disk. Prints one line of JSON: medians in ms, and ratios, which are medians over rounds of
the ratio within a round; below 1 pykv is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from peer import Peer, llama_peer, machine, model_path, pykv_peer, say

PAIRS = {
    "get": ["llama.cpp get", "plain copy"],
    "set": ["llama.cpp set", "plain overwrite"],
    "save": ["llama.cpp save", "llama.cpp save, synced", "plain write", "plain write, synced"],
    "load": ["llama.cpp load", "plain read"],
}
"""What pykv does, and what it is held against."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file; default PYKV_TEST_SMOLLM2 or the pulled SmolLM2")
    parser.add_argument("--depth", type=int, default=7633, help="tokens of the sequence (default 7633: 176 MB)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each call (default 7)")
    parser.add_argument("--folder", help="where files are written; default a new one for temporary files")
    return parser.parse_args()


def one_round(pykv: Peer, llama: Peer, folder: Path) -> dict[str, float]:
    """Do each thing once; returns ms by name."""
    mine, theirs, plain = (str(folder / name) for name in ("pykv", "llama.cpp", "plain"))
    return {
        "get": pykv.ask("state_get"),
        "llama.cpp get": llama.ask("state_get"),
        "plain copy": pykv.ask("plain_copy"),
        "set": pykv.ask("state_set"),
        "llama.cpp set": llama.ask("state_set"),
        "plain overwrite": pykv.ask("plain_overwrite"),
        "save": pykv.ask("state_save", path=mine),
        "llama.cpp save": llama.ask("state_save", path=theirs, sync=False),
        "llama.cpp save, synced": llama.ask("state_save", path=theirs, sync=True),
        "plain write": pykv.ask("plain_write", path=plain, sync=False),
        "plain write, synced": pykv.ask("plain_write", path=plain, sync=True),
        "load": pykv.ask("state_load", path=mine),
        "llama.cpp load": llama.ask("state_load", path=theirs),
        "plain read": pykv.ask("plain_read", path=mine),
    }


def main() -> None:
    args = arguments()
    result: dict[str, Any] = {"benchmark": "state", "machine": machine(), "tokens": args.depth}
    with ExitStack() as stack:
        folder = Path(args.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        pykv, llama = stack.enter_context(pykv_peer()), stack.enter_context(llama_peer("llama.cpp"))
        for peer in (pykv, llama):
            peer.ask("load", path=model_path(args.model))
            peer.ask("context", n_ctx=8192, n_threads=os.cpu_count() or 1, flash="on")
            peer.ask("book", depth=args.depth)
        pykv.ask("fill_rows")
        rounds = []
        for turn in range(args.rounds + 1):
            times = one_round(pykv, llama, folder)
            if turn:  # the first one warms up only
                rounds.append(times)
            say(f"round {turn}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in times.items()))
        result["MB"] = round((folder / "llama.cpp").stat().st_size / 1e6, 1)
    for name in rounds[0]:
        result[f"{name}, ms"] = round(median(times[name] for times in rounds), 1)
    for ours, others in PAIRS.items():
        for other in others:
            result[f"{ours} / {other}"] = round(median(times[ours] / times[other] for times in rounds), 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
