"""Where the commands write: results on stdout, all about them on stderr; and how sizes and times are spelt.

Colour follows rich: none where the output is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from time import monotonic
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 0.5
"""Seconds after which a bar says that something is being done."""


def results() -> Console:
    """Return a console on stdout."""
    from rich.console import Console

    return Console(highlight=False)


def notes() -> Console:
    """Return a console on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def write_json(record: Mapping[str, object], stream: TextIO | None = None) -> None:
    """Write one JSON object, on one line, to stdout or another stream."""
    (stream or sys.stdout).write(json.dumps(record, ensure_ascii=False) + "\n")


def finite(value: float) -> float | None:
    """Return a number for JSON, which knows no infinity."""
    return value if isfinite(value) else None


@contextmanager
def slow_bar(what: str, *, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show how far something is, on stderr if that is a terminal, once it takes long; takes what is done, and all."""
    from rich.progress import BarColumn, Progress, TextColumn

    console, since = notes(), monotonic()
    bar = Progress(
        TextColumn(what), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), console=console, transient=True
    )
    task = bar.add_task(what)

    def on_progress(n_done: int, n_all: int) -> None:
        if is_shown and not bar.live.is_started and console.is_terminal and monotonic() - since > PATIENCE:
            bar.start()
        bar.update(task, completed=n_done, total=n_all)

    try:
        yield on_progress
    finally:
        if bar.live.is_started:  # else it would write an empty line
            bar.stop()


def size(nbytes: int) -> str:
    """Spell a number of bytes with a binary unit: ``90.0 KiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Spell a time with the unit that reads best, from microseconds to seconds."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def rate(per_second: float) -> str:
    """Spell how many come in a second, with a decimal where few do."""
    return f"{per_second:.1f}" if per_second < 9.95 else f"{per_second:.0f}"
