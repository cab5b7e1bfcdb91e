"""Run thousands of random programs of verbs on pykv and on real llama.cpp, up to the first after which they differ.

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

from support.oracle import Oracle, OracleError
from support.verb_compare import Gave, shown
from support.verb_program import Call, Step, draw_program
from support.verb_setting import Setting
from support.verb_shrink import shrink
from support.verb_sides import Side

import pykv


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
        calls = "\n".join(f"  {i}: {shown(call)}" for i, call in enumerate(self.calls))
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
            return self._run(sides, numbers)

    def _side(self, stack: ExitStack, oracle: Oracle, setting: Setting) -> Side:
        path = self.paths[setting.model]
        model = stack.enter_context(pykv.Model.load(str(path)))
        ours = model.context(**setting.our_params)
        theirs = oracle.context(path, **setting.their_params)
        return Side(stack.enter_context(ours), stack.enter_context(theirs), setting)

    def _run(self, sides: Sequence[Side], numbers: range) -> Report:
        report, last = Report(), None
        for number in (*numbers, None):
            run = None if number is None else self._begun(sides[number % len(sides)], number, report)
            if last is not None:
                report.failure = self._compared(last, report)
            if report.failure or run is None:
                break
            run.side.post(run.calls, run.gave)
            last = run
        return report

    def _begun(self, side: Side, number: int, report: Report) -> Run:
        name = f"{self.seed}-{number}"
        program = draw_program(Random(name), side.setting.room)
        calls, gave = side.run_ours(program, report.tally)
        report.tally.update({"programs": 1, "calls": len(calls)})
        return Run(side, name, program, calls, gave)

    def _compared(self, run: Run, report: Report) -> Failure | None:
        try:
            verdict = run.side.verdict(run.calls, run.gave)
        except OracleError as error:  # its process has ended, so that nothing shorter can be tried
            return self._failure(run, run.calls, str(error))
        if verdict.ended:
            report.tally[f"not compared to its end: {verdict.ended}"] += 1
        report.note(f"{run.side.setting.type_k}/{run.side.setting.type_v}", verdict.nmse)
        return self._shrunk(run, verdict.difference) if verdict.difference else None

    def _shrunk(self, run: Run, difference: str) -> Failure:
        """Make the program shorter and plainer for as long as the sides still differ."""
        shortest = run.calls, difference

        def differs(program: Sequence[Step]) -> bool:
            nonlocal shortest
            calls, gave = run.side.run_ours(program, Counter())
            run.side.post(calls, gave)
            verdict = run.side.verdict(calls, gave)
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
