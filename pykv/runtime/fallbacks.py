"""Warnings of attention and row writes that run on another device than where K and V lie."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pykv.errors import FallbackWarning
from pykv.ggml import Device, MisplacedOp
from pykv.runtime.states.warn import warn_caller

_STORED = re.compile(r"cache_(?P<what>\w+)_l(?P<il>\d+)")
_Group = tuple[str, str, Device, Device]


def warn_of_fallbacks(ops: Iterable[MisplacedOp]) -> None:
    """Give one `FallbackWarning` for each operation and type; it names the layers."""
    groups: dict[_Group, set[int]] = {}
    for op in ops:
        found = _STORED.fullmatch(op.stored)
        if found is not None:
            group = (op.name, f"{found['what'].upper()} of type {op.dtype.label}", op.device, op.runs_on)
            groups.setdefault(group, set()).add(int(found["il"]))
    for (name, what, device, runs_on), layers in groups.items():
        warn_caller(
            f"{name} over {what} in {_listed(sorted(layers))} runs on {runs_on.name}, not on {device.name} where it "
            f"lies, so that it is copied at every step; pykv devices lists what {device.name} takes",
            FallbackWarning,
        )


def _listed(layers: list[int]) -> str:
    """Return numbers of layers in words, runs of them by their ends."""
    runs: list[list[int]] = []
    for il in layers:
        if runs and il == runs[-1][-1] + 1:
            runs[-1].append(il)
        else:
            runs.append([il])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"{'layer' if len(layers) == 1 else 'layers'} {words}"
