"""The steps of a trace: a batch that was decoded or a verb that was called, and what came of it. One JSON line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pykv.cells.arguments import shown
from pykv.runtime.trace.fields import by_sequence, ints, of_kind, taken
from pykv.runtime.trace.fingerprint import Fingerprint
from pykv.runtime.trace.held import Held, Ranges
from pykv.runtime.trace.outcome import Outcome
from pykv.typing import as_bool, as_int

OK = Outcome()

VERBS = {"clear": 1, "seq_rm": 3, "seq_cp": 4, "seq_keep": 1, "seq_add": 4, "seq_div": 4}
"""Verbs that a trace holds, and how many arguments each takes."""

ENDED = "ended"
"""What the last line of a trace has instead of a step, if recording stopped while the context went on: the reason."""


@dataclass(frozen=True)
class VerbStep:
    """A verb of the memory.

    Attributes
    ----------
    args : integers and bools as they were; whatever else a caller passed by its repr, as ``{"repr": ...}``.
    ranges : the sequences afterwards.
    held : what those hold that it may have changed.
    line : where it stands in the file, 0 = nowhere yet.
    """

    name: str
    args: tuple[Any, ...]
    outcome: Outcome
    ranges: Ranges
    held: Mapping[int, Held] = field(default_factory=dict)
    line: int = 0

    @classmethod
    def of(cls, name: str, args: Sequence[object], result: object, ranges: Ranges) -> VerbStep:
        return cls(name, tuple(map(_plain, args)), Outcome.of(result), ranges)

    def record(self) -> dict[str, object]:
        return {"do": self.name, "args": self.args, "outcome": self.outcome.record()} | _afterwards(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], line: int) -> VerbStep:
        name, args = record["do"], tuple(taken(record, "args", list))
        if len(args) != VERBS[name]:
            raise ValueError(f"{name} takes {VERBS[name]} arguments, got {len(args)}")
        for arg in args:
            if not isinstance(arg, (int, bool, type(None))):
                taken(of_kind("args", arg, dict), "repr", str)
        return cls(name, args, Outcome.from_record(record), _ranges(record), _held(record), line)

    @property
    def seqs(self) -> set[int] | None:
        """The sequences that it may change, None for all: a move may reach those that share cells."""
        named = {"seq_cp": self.args[:2], "seq_rm": self.args[:1]}.get(self.name, ())
        return {seq for seq in named if type(seq) is int} if named and named[0] != -1 else None

    def __str__(self) -> str:
        args = ", ".join(arg["repr"] if isinstance(arg, dict) else str(arg) for arg in self.args)
        return f"{self.name}({args})"


@dataclass(frozen=True)
class DecodeStep:
    """A batch.

    Attributes
    ----------
    tokens : ids, None where they were not recorded.
    pos : as they were used, or as they were given if the batch was refused; None = left to the memory.
    seqs_by_token : the sequences of each token.
    out : indices of the tokens whose logits were wanted.
    outside : indices of tokens that the vocabulary lacks, where ids were not recorded.
    embd : width of the embeddings, which are not recorded; 0 = there were none.
    stored : indices of the tokens that were stored before computing broke off; None = it did not.
    ranges, held, rows : the sequences afterwards, what those of the batch hold, and the fingerprints of the logits.
    line : where it stands in the file, 0 = nowhere yet.
    """

    tokens: tuple[int, ...] | None
    pos: Any
    seqs_by_token: tuple[tuple[int, ...], ...]
    out: tuple[int, ...]
    outside: tuple[int, ...] = ()
    embd: int = 0
    outcome: Outcome = OK
    stored: tuple[int, ...] | None = None
    ranges: Ranges = field(default_factory=dict)
    held: Mapping[int, Held] = field(default_factory=dict)
    rows: tuple[Fingerprint, ...] = ()
    line: int = 0

    def record(self) -> dict[str, object]:
        beside = {"outside": self.outside, "embd": self.embd, "rows": [row.record() for row in self.rows]}
        return (
            {"do": "decode", "tokens": self.tokens, "pos": self.pos, "seq": self.seqs_by_token, "out": self.out}
            | {"outcome": self.outcome.record()}
            | _afterwards(self)
            | {name: value for name, value in beside.items() if value}
            | ({} if self.stored is None else {"stored": self.stored})
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], line: int) -> DecodeStep:
        seqs = tuple(ints("seq", ids) for ids in taken(record, "seq", list))
        n, tokens = len(seqs), _or_none(record, "tokens")
        if tokens is not None and len(tokens) != n:
            raise ValueError(f"{len(tokens)} tokens have the sequences of {n}")
        return cls(
            tokens=tokens,
            pos=_positions(record, n),
            seqs_by_token=seqs,
            out=_indices("out", taken(record, "out", list), n),
            outside=_indices("outside", record.get("outside", []), n),
            embd=ints("embd", [record.get("embd", 0)])[0],
            outcome=Outcome.from_record(record),
            stored=_indices("stored", record["stored"], n) if "stored" in record else None,
            ranges=_ranges(record),
            held=_held(record),
            rows=tuple(map(Fingerprint.from_record, of_kind("rows", record.get("rows", []), list))),
            line=line,
        )

    @property
    def seqs(self) -> set[int] | None:
        """The sequences of its tokens."""
        return {seq for ids in self.seqs_by_token for seq in ids}

    def place_of_row(self, i: int) -> dict[str, int]:
        """Return which token the row of logits `i` belongs to, by sequence and position where that is known."""
        token = self.out[i]
        place = {"row": i, "seq": self.seqs_by_token[token][0]}
        return place if self.pos is None else place | {"pos": self.pos[token]}

    def private(self) -> DecodeStep:
        """Return it without anything that tells which tokens there were."""
        outcome = replace(self.outcome, message="the vocabulary lacks a token") if self.outside else self.outcome
        return replace(self, tokens=None, outcome=outcome, rows=())

    def computed(self) -> DecodeStep | None:
        """Return the part that was computed, if computing broke off, None for nothing; else the step itself."""
        kept = self.stored
        if kept is None or self.pos is None:
            return self
        return (
            None
            if not kept
            else replace(
                self,
                tokens=None if self.tokens is None else tuple(self.tokens[i] for i in kept),
                pos=[self.pos[i] for i in kept],
                seqs_by_token=tuple(self.seqs_by_token[i] for i in kept),
                out=(),
                outcome=OK,
            )
        )

    def __str__(self) -> str:
        n = len(self.seqs_by_token)
        where = ", ".join(map(str, sorted(self.seqs or ())))
        return f"decode of {n} token{'s' if n != 1 else ''} of sequence {where or 'none'}"


Step = VerbStep | DecodeStep


def step_from_record(record: Mapping[str, Any], line: int) -> Step:
    """Return the step of one JSON line.

    Raises
    ------
    ValueError : it is none; names the field.
    """
    do = taken(record, "do", str)
    if do == "decode":
        return DecodeStep.from_record(record, line)
    if do in VERBS:
        return VerbStep.from_record(record, line)
    raise ValueError(f"do={do!r} is unknown; known: decode, {', '.join(VERBS)}")


def _plain(arg: object) -> object:
    if arg is None or as_bool(arg) is not None:
        return as_bool(arg)
    number = as_int(arg)
    # JSON holds any integer, but Python refuses to spell those of thousands of digits
    return {"repr": shown(arg)} if number is None or abs(number) >= 2**64 else number


def _afterwards(step: Step) -> dict[str, object]:
    """Return what both kinds of step found afterwards, for JSON."""
    cells = {seq: held[: 2 if held.tokens is None else 3] for seq, held in step.held.items()}
    return {"seen": {str(seq): ends for seq, ends in step.ranges.items()}, "cells": cells}


def _ranges(record: Mapping[str, Any]) -> Ranges:
    return {seq: ints("seen", ends, 2) for seq, ends in by_sequence(record, "seen")}  # type: ignore[misc]


def _held(record: Mapping[str, Any]) -> dict[int, Held]:
    found = {}
    for seq, numbers in by_sequence(record, "cells"):
        if type(numbers) is not list or not 2 <= len(numbers) <= 3 or any(type(one) is not int for one in numbers):
            raise ValueError(f"cells={shown(numbers)} must be a list of 2 or 3 whole numbers")
        found[seq] = Held(*numbers)
    return found


def _or_none(record: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    return None if record.get(name, 0) is None else ints(name, taken(record, name, list))


def _indices(name: str, values: Any, n: int) -> tuple[int, ...]:
    indices = ints(name, values)
    if any(not 0 <= i < n for i in indices):
        raise ValueError(f"{name}={shown(values)} must name some of {n} tokens")
    return indices


def _positions(record: Mapping[str, Any], n: int) -> Any:
    """Return positions: none, one for each token, or several rows of them."""
    if record.get("pos", 0) is None:
        return None
    given = taken(record, "pos", list)
    for row in given if given and type(given[0]) is list else [given]:
        ints("pos", row, n)
    return given
