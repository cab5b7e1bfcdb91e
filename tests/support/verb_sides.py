"""One program on pykv and on real llama.cpp."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from traceback import format_exc
from typing import Any

import numpy as np
from support.oracle import OracleContext
from support.verb_compare import Comparison, Gave, Verdict, pairs
from support.verb_program import Call, State, Step, resolve
from support.verb_rules import EXCLUDED, WINDOW_GONE, for_llama_cpp
from support.verb_setting import Setting, Situation, parts_of

import pykv
from pykv.errors import BatchError, NoSlotError

CLEAR: Call = {"do": "clear", "args": [True]}
NOTHING: Call = {"do": "seq_add", "args": [0, -1, -1, 0]}
EMPTY = [-1, -1]


class Side:
    """A pair of contexts with one setting, which run program after program."""

    def __init__(self, ours: pykv.Context, theirs: OracleContext, setting: Setting) -> None:
        self.ours, self.theirs, self.setting = ours, theirs, setting
        self._parts = list(parts_of(ours.memory))
        self._comparison = Comparison.of(setting, self._parts)
        self._last: list[int] = []
        self._told: list[bool] = []

    def run_ours(self, program: Sequence[Step], tally: Counter[str]) -> tuple[list[Call], list[Gave]]:
        """Run a program on pykv; returns the calls it came to and what each gave."""
        calls, gave = [CLEAR], [self._make(CLEAR)]
        for step in program:
            state = State(pairs(gave[-1].ends)[: self.setting.n_seqs], self.setting.room)
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
        ends = [EMPTY * self.setting.n_seqs * len(self._parts), *(one.ends for one in ours)]
        told = [
            for_llama_cpp(call, self.setting, before, one.result)
            for call, before, one in zip(calls, ends, ours, strict=False)
        ]
        steps = [one or [NOTHING] for one in told]
        self._told = list(map(bool, told))
        self._last = list(accumulate(map(len, steps)))
        self.theirs.post_run(self.setting.n_seqs, list(chain.from_iterable(steps)))

    def verdict(self, calls: Sequence[Call], ours: Sequence[Gave]) -> Verdict:
        """Return how what the posted calls gave there compares to what they gave here."""
        gave = self.theirs.collect_run()
        theirs = [Gave(*gave[last - 1]) for last in self._last]
        untold = [ours[i]._replace(ends=one.ends, rows=None) for i, one in enumerate(theirs)]
        theirs = [one if was_told else other for one, other, was_told in zip(theirs, untold, self._told, strict=True)]
        return self._comparison.verdict(calls, ours, theirs)

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
        except BatchError as error:
            result = WINDOW_GONE if "were overwritten" in str(error) else -1
        except NoSlotError:
            result = 1
        except Exception:  # whatever it is, llama.cpp has not done likewise
            result = format_exc(limit=-2)
        seqs = range(self.setting.n_seqs)
        ends = [end(seq_id) for part in self._parts for seq_id in seqs for end in (part.pos_min, part.pos_max)]
        return Gave(result, ends, rows)


def _kinds(at: Situation) -> list[str]:
    """Return what a call is about to show, for the tally."""
    do, kinds = at.call["do"], [at.call["do"]]
    if do == "decode":
        streams = [cache.streams for cache in at.caches]
        if any(cells.shift.any() for one in streams if one.has_shift for cells in one.cells):
            kinds.append("shift before decode")
        if any(one.pending_copies for one in streams):
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
    if call["do"] == "seq_rm":
        return [] if result else ["refused seq_rm"]
    outcome = {-1: "refused decode", 1: "decode without room", WINDOW_GONE: f"decode, {WINDOW_GONE}"}.get(result)
    return [outcome] if call["do"] == "decode" and outcome else []
