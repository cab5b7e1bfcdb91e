"""Kills a process that saves a small file again and again, at random instants, and looks at what is on the disk.

Arguments: a folder, how many kills, and whether the files have names from the start. Prints how many files were whole,
old or new, how many were saved, how often a kill left something hidden, and what lies there after one more save.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from pykv.state_format import write_durably

SMALLEST = 60_000


def content(i: int) -> bytes:
    """Return what is written at the i-th time: the length and every byte tell which it is."""
    return bytes([i % 251]) * (SMALLEST + i % 7919)


def save(path: Path, i: int) -> float:
    """Save, and return how long it took, us."""
    data, began = content(i), time.perf_counter()
    write_durably(path, [data[:10], data[10:20_000], data[20_000:]])
    return (time.perf_counter() - began) * 1e6


def save_forever(path: Path, i: int) -> None:
    while True:
        save(path, i)
        i += 1


def is_whole(path: Path, first: int) -> bool:
    """Return whether the file is one of those that were written, none of them older than the first."""
    data = path.read_bytes()
    i = len(data) - SMALLEST
    return i >= first and data == content(i)


def main(folder: Path, n_kills: int) -> None:
    rng = random.Random(6)
    path, n_whole, n_left, i = folder / "state.bin", 0, 0, 0
    save_us = [save(path, 0) for _ in range(5)]
    for _ in range(n_kills):
        child = os.fork()
        if not child:
            save_forever(path, i + 1)
        time.sleep(rng.uniform(0, 4 * sorted(save_us)[2]) / 1e6)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        n_whole += is_whole(path, i)
        n_left += len(os.listdir(folder)) > 1
        i = len(path.read_bytes()) - SMALLEST
    save(path, i)
    print(n_whole, i, n_left, *os.listdir(folder))


if __name__ == "__main__":
    if sys.argv[3:] == ["named"] and hasattr(os, "O_TMPFILE"):
        del os.O_TMPFILE
    main(Path(sys.argv[1]), int(sys.argv[2]))
