"""Where the commands write: results on stdout, all about them on stderr; and how sizes and times are spelt.

Colour follows rich: none where the output is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def results() -> Console:
    """Return a console on stdout."""
    from rich.console import Console

    return Console(highlight=False)


def notes() -> Console:
    """Return a console on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def write_json(record: Mapping[str, object]) -> None:
    """Write one JSON object, on one line, to stdout."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")


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
