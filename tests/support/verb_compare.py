"""What a program gave on pykv and on real llama.cpp, and where the two differ first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from support.oracle import F32Array
from support.verb_program import Call
from support.verb_setting import MOVES, Setting

from pykv.cells import SwaType, Window
from pykv.memory import KVCache


class Gave(NamedTuple):
    """What one call gave: its result or its error, the ends of all sequences afterwards, the rows of a decode.

    ends : pos_min and pos_max of each sequence in turn, part by part.
    """

    result: Any
    ends: list[int]
    rows: F32Array | None


class Verdict(NamedTuple):
    """How two runs of the same calls compare.

    Attributes
    ----------
    difference : what differs first, None if nothing does.
    nmse : how far rows were apart.
    ended : why the rest was not compared, None if all was.
    """

    difference: str | None
    nmse: float
    ended: str | None = None


@dataclass(frozen=True)
class Comparison:
    """How to compare.

    Attributes
    ----------
    windows : per part, its window, None = it keeps all.
    keeps_alike : both sides overwrite the same cells behind windows. With `swa_full` pykv overwrites none, and of forks
        it keeps no token that nobody sees, while llama.cpp keeps those for good.
    """

    setting: Setting
    windows: tuple[Window | None, ...]
    keeps_alike: bool

    @classmethod
    def of(cls, setting: Setting, parts: Sequence[Any]) -> Self:
        caches = [isinstance(part, KVCache) and part.spec.window.type is not SwaType.NONE for part in parts]
        windows = tuple(part.spec.window if has else None for part, has in zip(parts, caches, strict=True))
        return cls(setting, windows, keeps_alike=setting.n_seqs == 1 and not setting.swa_full)

    def verdict(self, calls: Sequence[Call], ours: Sequence[Gave], theirs: Sequence[Gave]) -> Verdict:
        """Compare what each call gave, in order, up to the first difference."""
        worst = 0.0
        for i, (call, mine, other) in enumerate(zip(calls, ours, theirs, strict=True)):
            if why := self._why_no_more(call, ours, theirs, i):
                return Verdict(None, worst, why)
            at = f"call {i}, {shown(call)}"
            if mine.result != other.result:
                return Verdict(f"{at}: pykv gave {mine.result!r}, llama.cpp {other.result!r}", worst)
            if self._seen(mine.ends, other.ends) != other.ends:
                ends = f"pykv's sequences are {pairs(mine.ends)}, llama.cpp's {pairs(other.ends)}"
                return Verdict(f"{at}: {ends}", worst)
            if mine.rows is not None and other.rows is not None and len(other.rows):
                apart = worst_nmse(mine.rows, other.rows)
                worst = max(worst, apart)
                if not apart <= self.setting.tolerance:  # nor NaN
                    return Verdict(f"{at}: rows differ by {apart:.2e}, more than {self.setting.tolerance:.0e}", worst)
        return Verdict(None, worst)

    def _seen(self, mine: list[int], other: list[int]) -> list[int]:
        """Return our ends, with theirs in windows that keep other tokens behind what is seen."""
        if self.keeps_alike or not any(self.windows):
            return mine
        n = 2 * self.setting.n_seqs
        parts = enumerate(self.windows)
        return [end for i, window in parts for end in (mine if window is None else other)[i * n : (i + 1) * n]]

    def _why_no_more(self, call: Call, ours: Sequence[Gave], theirs: Sequence[Gave], i: int) -> str | None:
        """Return why llama.cpp computes something else from call `i` on, as far as its windows tell."""
        if call["do"] in MOVES and i and not self.keeps_alike:
            before = ours[i - 1].ends, theirs[i - 1].ends
            return "windows that have kept unlike tokens are moved" if before[0] != before[1] else None
        if call["do"] != "decode" or ours[i].result != 0:
            return None
        if theirs[i].result == 1 and any(self.windows) and not self.keeps_alike:
            return "llama.cpp's window is full of what nobody sees"
        begins = {s: p for ids, p in zip(reversed(call["seq"]), reversed(call["pos"]), strict=True) for s in ids}
        for part, window in enumerate(self.windows):
            for s, p in begins.items() if window is not None else ():
                at = part * self.setting.n_seqs + s
                mine, before, after = (pairs(gave.ends)[at] for gave in (ours[i - 1], theirs[i - 1], theirs[i]))
                seen = max(mine[0], int(window.span(p)[0]), 0)
                if mine[1] < seen:
                    continue
                if not self.keeps_alike and (before[1] < mine[1] or before[0] > seen):
                    return "llama.cpp's window lacks what it overwrote"
                if after[0] > seen:
                    return "llama.cpp's window loses in its search for room what the batch must see"
        return None


def pairs(ends: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def worst_nmse(rows: F32Array, expected: F32Array) -> float:
    """Return the NMSE of the row that differs most."""
    assert rows.shape == expected.shape, f"{rows.shape} and {expected.shape}"
    return float((np.square(rows - expected).sum(axis=1) / np.square(expected).sum(axis=1)).max())


def shown(call: Call) -> str:
    if call["do"] != "decode":
        return f"{call['do']}({', '.join(map(str, call['args']))})"
    runs: list[list[Any]] = []
    for ids, p in zip(call["seq"], call["pos"], strict=True):
        if runs and runs[-1][0] == ids and runs[-1][2] == p - 1:
            runs[-1][2] = p
        else:
            runs.append([ids, p, p])
    return "decode " + " ".join(f"{ids}@{p}" if p == last else f"{ids}@{p}..{last}" for ids, p, last in runs)
