"""Time loading a model, pykv against llama.cpp, in turns and from the page cache.

    PYKV_ORACLE_PYTHON=/path/to/venv/bin/python python benchmarks/load.py [--model FILE]

llama.cpp reads the vocabulary while it loads; pykv makes its tokenizer when it is first used, so pykv is
timed both ways. Prints one line of JSON: medians in ms and ratios (below 1 = pykv is faster).
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from peer import llama_peer, machine, model_path, pykv_peer, say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file; default PYKV_TEST_SMOLLM2 or the pulled SmolLM2")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    path = model_path(args.model)
    times: dict[str, list[float]] = {"pykv": [], "pykv with tokenizer": [], "llama.cpp": []}
    with pykv_peer() as ours, llama_peer("llama.cpp") as theirs:
        sides = {"pykv": ours.ask("about"), "llama.cpp": theirs.ask("about")}
        for turn in range(args.rounds + 1):  # the first turn fills the page cache and is dropped
            measured = {
                "pykv": ours.ask("load", path=path),
                "pykv with tokenizer": ours.ask("load", path=path, tokenizer=True),
                "llama.cpp": theirs.ask("load", path=path),
            }
            ours.ask("unload")
            theirs.ask("unload")
            say(f"{turn or 'warm-up'}: { {k: round(v, 1) for k, v in measured.items()} }")
            if turn:
                for name, value in measured.items():
                    times[name].append(value)
    result: dict[str, Any] = {"benchmark": "load", "machine": machine(), "sides": sides}
    result["ms"] = {name: round(median(values), 1) for name, values in times.items()}
    for name in ("pykv", "pykv with tokenizer"):
        pairs = zip(times[name], times["llama.cpp"], strict=True)
        result[f"{name} / llama.cpp"] = round(median(a / b for a, b in pairs), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
