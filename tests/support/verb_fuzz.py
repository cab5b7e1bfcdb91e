"""Run random programs of verbs on pykv and on real llama.cpp, and find the first call after which they differ.

llama.cpp runs one program while pykv runs the next. Nothing is drawn at random that would end llama.cpp's process
or that has no meaning there: sequences beyond n_seq_max, batches beyond n_batch, seq_div by less than 1, positions
beyond int32. What else is known to differ is left out by `EXCLUDED`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from traceback import format_exc
from typing import Any, NamedTuple

import numpy as np
from support.oracle import F32Array, Oracle, OracleContext, OracleError
from support.verb_program import Call, State, Step, draw_program, resolve
from support.verb_rules import EXCLUDED, Setting, Situation
from support.verb_shrink import shrink

import pykv
from pykv.errors import BatchError, NoSlotError


class Gave(NamedTuple):
    """What one call gave: its result or its error, the ends of all sequences afterwards, the rows of a decode."""

    result: Any
    ends: list[int]
    rows: F32Array | None


class Side:
    """A pair of contexts with one setting, which run program after program."""

    def __init__(self, ours: pykv.Context, theirs: OracleContext, setting: Setting) -> None:
        self.ours, self.theirs, self.setting = ours, theirs, setting

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

    def post(self, calls: Sequence[Call]) -> None:
        """Start the same calls on llama.cpp."""
        self.theirs.post_run(self.setting.n_seqs, list(calls))

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
        except BatchError:
            result = -1
        except NoSlotError:
            result = 1
        except Exception:  # whatever it is, llama.cpp has not done likewise
            result = format_exc(limit=-2)
        return Gave(
            result, [p for s in range(self.setting.n_seqs) for p in (memory.pos_min(s), memory.pos_max(s))], rows
        )


CLEAR: Call = {"do": "clear", "args": [True]}


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
        kinds.append("shared move")
    elif do == "seq_cp" and not at.setting.unified and at.call["args"][0] != at.call["args"][1]:
        kinds.append("copy across streams")
    return kinds


def _kinds_after(call: Call, result: Any) -> list[str]:
    outcome = {-1: "refused decode", 1: "decode without room"}.get(result)
    return [outcome] if call["do"] == "decode" and outcome else []


class Verdict(NamedTuple):
    """What differs first between two runs of the same calls, None if nothing does, and how far rows were apart."""

    difference: str | None
    nmse: float


def compare(setting: Setting, calls: Sequence[Call], ours: Sequence[Gave], theirs: Sequence[Any]) -> Verdict:
    """Compare what each call gave, in order, up to the first difference."""
    worst = 0.0
    for i, (call, mine, other) in enumerate(zip(calls, ours, map(Gave._make, theirs), strict=True)):
        at = f"call {i}, {_shown(call)}"
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


def _shown(call: Call) -> str:
    if call["do"] != "decode":
        return f"{call['do']}({', '.join(map(str, call['args']))})"
    return "decode " + " ".join(f"{ids}@{p}" for ids, p in zip(call["seq"], call["pos"], strict=True))


# many programs


@dataclass(frozen=True)
class Failure:
    """A program after which the two sides differ, as short as it could be made.

    Attributes
    ----------
    name : seed and number of the program.
    trace : what pykv did, for `pykv replay`.
    """

    name: str
    setting: Setting
    calls: list[Call]
    difference: str
    trace: Path

    def __str__(self) -> str:
        calls = "\n".join(f"  {i}: {_shown(call)}" for i, call in enumerate(self.calls))
        return f"program {self.name} on {self.setting}:\n{calls}\n{self.difference}\ntrace: {self.trace}"


@dataclass
class Report:
    """How it went.

    Attributes
    ----------
    tally : how often each kind of call was made or left out.
    nmse : largest one between rows, by types of K and V.
    """

    tally: Counter[str] = field(default_factory=Counter)
    nmse: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None

    def add(self, other: Report) -> None:
        """Take in the report of other programs."""
        self.tally += other.tally
        for types, apart in other.nmse.items():
            self.note(types, apart)
        self.failure = self.failure or other.failure

    def note(self, types: str, apart: float) -> None:
        """Keep the largest NMSE."""
        self.nmse[types] = max(apart, self.nmse.get(types, 0.0))

    def __str__(self) -> str:
        tally = ", ".join(f"{n} {kind}" for kind, n in self.tally.most_common())
        nmse = ", ".join(f"{types} {apart:.1e}" for types, apart in sorted(self.nmse.items()))
        return f"{tally}; largest NMSE: {nmse}"


@dataclass(frozen=True)
class Run:
    """A program that pykv has run and llama.cpp is running."""

    side: Side
    name: str
    program: list[Step]
    calls: list[Call]
    gave: list[Gave]


@dataclass(frozen=True)
class Fuzzer:
    """Which programs to run, and on what. Can be sent to another process.

    Attributes
    ----------
    settings : taken in turn.
    paths : files of their models.
    failures : folder for the trace of a program that failed.
    """

    settings: Sequence[Setting]
    paths: Mapping[str, Path]
    seed: int
    failures: Path

    def run(self, numbers: range) -> Report:
        """Run the programs of these numbers, or up to the first that fails."""
        with Oracle.from_environment() as oracle, ExitStack() as stack:
            sides = [self._side(stack, oracle, setting) for setting in self.settings]
            return self._run(oracle, sides, numbers)

    def _side(self, stack: ExitStack, oracle: Oracle, setting: Setting) -> Side:
        path = self.paths[setting.model]
        model = stack.enter_context(pykv.Model.load(str(path)))
        ours = model.context(**setting.params, **setting.our_params)
        theirs = oracle.context(path, **setting.params, **setting.their_params)
        return Side(stack.enter_context(ours), stack.enter_context(theirs), setting)

    def _run(self, oracle: Oracle, sides: Sequence[Side], numbers: range) -> Report:
        report, last = Report(), None
        for number in (*numbers, None):
            run = None if number is None else self._begun(sides[number % len(sides)], number, report)
            if last is not None:
                report.failure = self._compared(oracle, last, report)
            if report.failure or run is None:
                break
            run.side.post(run.calls)
            last = run
        return report

    def _begun(self, side: Side, number: int, report: Report) -> Run:
        name = f"{self.seed}-{number}"
        program = draw_program(Random(name), side.setting.room)
        calls, gave = side.run_ours(program, report.tally)
        report.tally.update({"programs": 1, "calls": len(calls)})
        return Run(side, name, program, calls, gave)

    def _compared(self, oracle: Oracle, run: Run, report: Report) -> Failure | None:
        try:
            verdict = compare(run.side.setting, run.calls, run.gave, oracle.collect())
        except OracleError as error:  # its process has ended, so that nothing shorter can be tried
            return self._failure(run, run.calls, str(error))
        report.note(f"{run.side.setting.type_k}/{run.side.setting.type_v}", verdict.nmse)
        return self._shrunk(oracle, run, verdict.difference) if verdict.difference else None

    def _shrunk(self, oracle: Oracle, run: Run, difference: str) -> Failure:
        """Make the program shorter and plainer for as long as the sides still differ."""
        shortest = run.calls, difference

        def differs(program: Sequence[Step]) -> bool:
            nonlocal shortest
            calls, gave = run.side.run_ours(program, Counter())
            run.side.post(calls)
            verdict = compare(run.side.setting, calls, gave, oracle.collect())
            if verdict.difference:
                shortest = calls, verdict.difference
            return verdict.difference is not None

        shrink(run.program, differs)
        return self._failure(run, *shortest)

    def _failure(self, run: Run, calls: list[Call], difference: str) -> Failure:
        self.failures.mkdir(parents=True, exist_ok=True)
        trace = self.failures / f"verbs-{run.name}.jsonl"
        run.side.record(calls, trace)
        return Failure(run.name, run.side.setting, calls, difference, trace)
