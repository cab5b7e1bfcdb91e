"""Run random programs of verbs on pykv and on real llama.cpp, and find the first call after which they differ.

llama.cpp runs one program while pykv runs the next. Nothing is drawn at random that would end llama.cpp's process
or that has no meaning there: sequences beyond n_seq_max, batches beyond n_batch, seq_div by less than 1, positions
beyond int32. What else is known to differ is left out by `EXCLUDED`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

import numpy as np
from support.oracle import F32Array, Oracle, OracleContext, OracleError
from support.verb_program import Call, State, Step, draw_program, resolve
from support.verb_rules import EXCLUDED, Setting, Situation

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
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
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


def first_difference(
    setting: Setting, calls: Sequence[Call], ours: Sequence[Gave], theirs: Sequence[Any]
) -> str | None:
    """Return what differs first between two runs of the same calls, or None."""
    for i, (call, mine, other) in enumerate(zip(calls, ours, map(Gave._make, theirs), strict=True)):
        at = f"call {i}, {_shown(call)}"
        if mine.result != other.result:
            return f"{at}: pykv gave {mine.result!r}, llama.cpp {other.result!r}"
        if mine.ends != other.ends:
            return f"{at}: pykv's sequences are {_pairs(mine.ends)}, llama.cpp's {_pairs(other.ends)}"
        if mine.rows is not None and other.rows is not None and len(other.rows):
            apart = worst_nmse(mine.rows, other.rows)
            if not apart <= setting.tolerance:
                return f"{at}: rows differ by {apart:.2e}, more than {setting.tolerance:.0e}"
    return None


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
    """A program after which the two sides differ, as short as it could be made."""

    setting: Setting
    name: str
    calls: list[Call]
    difference: str

    def write(self, folder: Path) -> Path:
        """Write the calls as a trace and return where."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"verbs-{self.name.replace('/', '-')}.jsonl"
        header = {"program": self.name, "difference": self.difference, **asdict(self.setting)}
        path.write_text("".join(json.dumps(line) + "\n" for line in (header, *self.calls)))
        return path

    def __str__(self) -> str:
        calls = "\n".join(f"  {i}: {_shown(call)}" for i, call in enumerate(self.calls))
        return f"program {self.name} on {self.setting}:\n{calls}\n{self.difference}"


@dataclass
class Run:
    """A program that pykv has run and llama.cpp is running."""

    side: Side
    name: str
    program: list[Step]
    calls: list[Call]
    gave: list[Gave]


class Fuzzer:
    """Keeps a pair of contexts for every setting and runs programs on them in turn.

    Attributes
    ----------
    tally : how often each kind of call was made or left out.
    """

    def __init__(self, oracle: Oracle, settings: Sequence[Setting], paths: Mapping[str, Path]) -> None:
        self._oracle = oracle
        self._open = ExitStack()
        self.tally: Counter[str] = Counter()
        models = {name: self._open.enter_context(pykv.Model.load(str(paths[name]))) for name in paths}
        self._sides = [
            Side(
                self._open.enter_context(models[one.model].context(**one.params, reference_moves=one.reference_moves)),
                self._open.enter_context(oracle.context(paths[one.model], **one.params)),
                one,
            )
            for one in settings
        ]

    def run(self, seed: int, numbers: Iterable[int]) -> Failure | None:
        """Run programs, the settings in turn; returns the first after which the two sides differ."""
        last: Run | None = None
        for number in numbers:
            run = self._run_ours(seed, number)
            if last is not None and (failure := self._compared(last)):
                return failure
            run.side.post(run.calls)
            last = run
        return None if last is None else self._compared(last)

    def _run_ours(self, seed: int, i: int) -> Run:
        side, name = self._sides[i % len(self._sides)], f"{seed}/{i}"
        program = draw_program(Random(name), side.setting.room)
        calls, gave = side.run_ours(program, self.tally)
        self.tally.update({"programs": 1, "calls": len(calls)})
        return Run(side, name, program, calls, gave)

    def _compared(self, run: Run) -> Failure | None:
        try:
            theirs = self._oracle.collect()
        except OracleError as error:
            return Failure(run.side.setting, run.name, run.calls, str(error))
        difference = first_difference(run.side.setting, run.calls, run.gave, theirs)
        return self._shrunk(run, difference) if difference else None

    def _shrunk(self, run: Run, difference: str) -> Failure:
        """Take steps out for as long as the sides still differ."""
        shortest = Failure(run.side.setting, run.name, run.calls, difference)

        def differs(program: Sequence[Step]) -> bool:
            nonlocal shortest
            calls, gave = run.side.run_ours(program, Counter())
            run.side.post(calls)
            found = first_difference(run.side.setting, calls, gave, self._oracle.collect())
            if found:
                shortest = Failure(run.side.setting, run.name, calls, found)
            return found is not None

        shrink(run.program, differs)
        return shortest

    def close(self) -> None:
        """Close all contexts and models."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fuzz(
    settings: Sequence[Setting], paths: Mapping[str, Path], seed: int, numbers: range
) -> tuple[Counter[str], Failure | None]:
    """Run some programs in contexts and a llama.cpp of their own: a job for one of several processes."""
    with Oracle.from_environment() as oracle, Fuzzer(oracle, settings, paths) as fuzzer:
        failure = fuzzer.run(seed, numbers)
        return fuzzer.tally, failure


def shrink(program: Sequence[Step], differs: Callable[[Sequence[Step]], bool]) -> list[Step]:
    """Return a program that still differs, but no longer does so with any one step less."""
    steps, size = list(program), len(program)
    while size:
        i = 0
        while i < len(steps):
            shorter = steps[:i] + steps[i + size :]
            if differs(shorter):
                steps = shorter
            else:
                i += size
        size = len(steps) // 2 if size > len(steps) else size // 2
    return steps
