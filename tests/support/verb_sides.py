"""One program on pykv and on real llama.cpp, and where the two differ first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from traceback import format_exc
from typing import Any, NamedTuple

import numpy as np
from support.oracle import F32Array, OracleContext
from support.verb_program import Call, State, Step, resolve
from support.verb_rules import EXCLUDED, Setting, Situation, for_llama_cpp

import pykv
from pykv.errors import BatchError, NoSlotError

CLEAR: Call = {"do": "clear", "args": [True]}
NOTHING: Call = {"do": "seq_add", "args": [0, -1, -1, 0]}
EMPTY = [-1, -1]


class Gave(NamedTuple):
    """What one call gave: its result or its error, the ends of all sequences afterwards, the rows of a decode."""

    result: Any
    ends: list[int]
    rows: F32Array | None


class Side:
    """A pair of contexts with one setting, which run program after program."""

    def __init__(self, ours: pykv.Context, theirs: OracleContext, setting: Setting) -> None:
        self.ours, self.theirs, self.setting = ours, theirs, setting
        self._last: list[int] = []

    def run_ours(self, program: Sequence[Step], tally: Counter[str]) -> tuple[list[Call], list[Gave]]:
        """Run a program on pykv; returns the calls it came to and what each gave."""
        calls, gave = [CLEAR], [self._make(CLEAR)]
        for step in program:
            state = State(_pairs(gave[-1].ends), self.setting.room)
            for call in resolve(step, state):
                situation = Situation(call, self.setting, self.ours.memory)
                if why := next((rule.__name__ for rule in EXCLUDED if rule(situation)), None):
                    tally[f"left out: {why}"] += 1
                    continue
                before = _kinds(situation)
                calls.append(call)
                gave.append(self._make(call))
                tally.update(before + _kinds_after(call, gave[-1].result))
        return calls, gave

    def post(self, calls: Sequence[Call], ours: Sequence[Gave]) -> None:
        """Start the same calls, which pykv has made, on llama.cpp."""
        ends = [EMPTY * self.setting.n_seqs, *(one.ends for one in ours)]
        said = [for_llama_cpp(call, self.setting, before) for call, before in zip(calls, ends, strict=False)]
        said = [told or [NOTHING] for told in said]
        self._last = list(accumulate(map(len, said)))
        self.theirs.post_run(self.setting.n_seqs, list(chain.from_iterable(said)))

    def collect(self) -> list[Gave]:
        """Return what each of the posted calls gave."""
        gave = self.theirs.collect_run()
        return [Gave(*gave[last - 1]) for last in self._last]

    def record(self, calls: Sequence[Call], path: Path) -> None:
        """Make calls on pykv once more, and write a trace."""
        self._make(CLEAR)
        with self.ours.trace(path):
            for call in calls:
                self._make(call)

    def _make(self, call: Call) -> Gave:
        memory, rows = self.ours.memory, None
        try:
            if call["do"] == "decode":
                self.ours.decode(pykv.Batch(call["tokens"], call["pos"], call["seq"], np.array(call["out"], bool)))
                result, rows = 0, self.ours.logits
            else:
                result = getattr(memory, call["do"])(*call["args"])
            memory.check()
        except BatchError:
            result = -1
        except NoSlotError:
            result = 1
        except Exception:  # whatever it is, llama.cpp has not done likewise
            result = format_exc(limit=-2)
        ends = [end(seq_id) for seq_id in range(self.setting.n_seqs) for end in (memory.pos_min, memory.pos_max)]
        return Gave(result, ends, rows)


def _pairs(ends: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def _kinds(at: Situation) -> list[str]:
    """Return what a call is about to show, for the tally."""
    do, kinds = at.call["do"], [at.call["do"]]
    if do == "decode":
        streams = at.memory.streams
        if streams.has_shift and any(cells.shift.any() for cells in streams.cells):
            kinds.append("shift before decode")
        if streams.pending_copies:
            kinds.append("copy before decode")
        if len({ids[0] for ids in at.call["seq"]}) > 1:
            kinds.append("decode of several sequences")
    elif at.is_shared_move:
        kinds.append("shared move" if at.setting.reference_moves else "move out of shared cells")
    elif do == "seq_div" and not at.setting.reference_moves:
        kinds.append("division the right way")
    elif do == "seq_cp" and not at.setting.unified and at.call["args"][0] != at.call["args"][1]:
        kinds.append("copy across streams" if at.setting.in_their_streams else "copy of a part across streams")
    return kinds


def _kinds_after(call: Call, result: Any) -> list[str]:
    outcome = {-1: "refused decode", 1: "decode without room"}.get(result)
    return [outcome] if call["do"] == "decode" and outcome else []


class Verdict(NamedTuple):
    """What differs first between two runs of the same calls, None if nothing does, and how far rows were apart."""

    difference: str | None
    nmse: float


def compare(setting: Setting, calls: Sequence[Call], ours: Sequence[Gave], theirs: Sequence[Gave]) -> Verdict:
    """Compare what each call gave, in order, up to the first difference."""
    worst = 0.0
    for i, (call, mine, other) in enumerate(zip(calls, ours, theirs, strict=True)):
        at = f"call {i}, {shown(call)}"
        if mine.result != other.result:
            return Verdict(f"{at}: pykv gave {mine.result!r}, llama.cpp {other.result!r}", worst)
        if mine.ends != other.ends:
            ends = f"pykv's sequences are {_pairs(mine.ends)}, llama.cpp's {_pairs(other.ends)}"
            return Verdict(f"{at}: {ends}", worst)
        if mine.rows is not None and other.rows is not None and len(other.rows):
            apart = worst_nmse(mine.rows, other.rows)
            worst = max(worst, apart)
            if not apart <= setting.tolerance:  # nor NaN
                return Verdict(f"{at}: rows differ by {apart:.2e}, more than {setting.tolerance:.0e}", worst)
    return Verdict(None, worst)


def worst_nmse(rows: F32Array, expected: F32Array) -> float:
    """Return the NMSE of the row that differs most."""
    assert rows.shape == expected.shape, f"{rows.shape} and {expected.shape}"
    return float((np.square(rows - expected).sum(axis=1) / np.square(expected).sum(axis=1)).max())


def shown(call: Call) -> str:
    if call["do"] != "decode":
        return f"{call['do']}({', '.join(map(str, call['args']))})"
    return "decode " + " ".join(f"{ids}@{p}" for ids, p in zip(call["seq"], call["pos"], strict=True))
