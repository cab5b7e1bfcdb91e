"""The steps of a trace: a batch that was decoded or a verb that was called, and what came of it. One JSON line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pykv.cells.arguments import shown
from pykv.runtime.trace.fingerprint import Fingerprint
from pykv.typing import as_bool, as_int

VERBS = {"clear": 1, "seq_rm": 3, "seq_cp": 4, "seq_keep": 1, "seq_add": 4, "seq_div": 4}
"""Verbs that a trace holds, and how many arguments each takes."""

HALF_WAY = (
    "ComputeCancelled",
    "ComputeError",
    "AllocError",
    "KeyboardInterrupt",
    "MemoryError",
    "UnsupportedOpError",
)
"""Errors after which the ubatches that were computed stay in the memory."""

Ranges = Mapping[int, tuple[int, int]]
"""Sequence → its smallest and its largest position; empty sequences are left out."""


@dataclass(frozen=True)
class Outcome:
    """What a step returned, or the error that it raised.

    Attributes
    ----------
    value : "ok" for a decode, else what the verb returned.
    error : name of the error's class, None if there was none.
    """

    value: object = "ok"
    error: str | None = None
    message: str = ""

    @classmethod
    def of(cls, result: object) -> Outcome:
        """Return the outcome of what a verb's listener hears: a value, or an exception."""
        if isinstance(result, BaseException):
            return cls(None, type(result).__name__, str(result))
        return cls(result if isinstance(result, (bool, int, float, str, type(None))) else shown(result))

    def record(self) -> object:
        """Return it for JSON."""
        return self.value if self.error is None else {"error": self.error, "message": self.message}

    @classmethod
    def from_record(cls, record: object) -> Outcome:
        """Return the outcome of a record."""
        if isinstance(record, Mapping):
            return cls(None, str(record["error"]), str(record.get("message", "")))
        return cls(record)

    def is_like(self, other: Outcome) -> bool:
        """Tell whether both came to the same; messages may name other sizes."""
        return (self.value, self.error) == (other.value, other.error)

    def __str__(self) -> str:
        return str(self.value) if self.error is None else f"{self.error}: {self.message}"


@dataclass(frozen=True)
class VerbStep:
    """A verb of the memory.

    Attributes
    ----------
    args : integers and bools as they were; whatever else a caller passed by its repr, as ``{"repr": ...}``.
    ranges : the sequences afterwards.
    line : where it stands in the file, 0 = nowhere yet.
    """

    name: str
    args: tuple[Any, ...]
    outcome: Outcome
    ranges: Ranges
    line: int = 0

    @classmethod
    def of(cls, name: str, args: Sequence[object], result: object, ranges: Ranges) -> VerbStep:
        return cls(name, tuple(map(_plain, args)), Outcome.of(result), ranges)

    def record(self) -> dict[str, object]:
        return {"do": self.name, "args": self.args, "outcome": self.outcome.record(), "seen": _seen(self.ranges)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], line: int) -> VerbStep:
        args = tuple(record["args"])
        if len(args) != VERBS[record["do"]]:
            raise ValueError(f"{record['do']} takes {VERBS[record['do']]} arguments, got {len(args)}")
        return cls(record["do"], args, Outcome.from_record(record["outcome"]), _ranges(record["seen"]), line)

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
    ranges, rows : the sequences afterwards, and the fingerprints of the logits.
    line : where it stands in the file, 0 = nowhere yet.
    """

    tokens: tuple[int, ...] | None
    pos: Any
    seqs_by_token: tuple[tuple[int, ...], ...]
    out: tuple[int, ...]
    outside: tuple[int, ...] = ()
    embd: int = 0
    outcome: Outcome = Outcome()
    ranges: Ranges = field(default_factory=dict)
    rows: tuple[Fingerprint, ...] = ()
    line: int = 0

    def record(self) -> dict[str, object]:
        beside = {"outside": self.outside, "embd": self.embd, "rows": [row.record() for row in self.rows]}
        return {
            "do": "decode",
            "tokens": self.tokens,
            "pos": self.pos,
            "seq": self.seqs_by_token,
            "out": self.out,
            "outcome": self.outcome.record(),
            "seen": _seen(self.ranges),
        } | {name: value for name, value in beside.items() if value}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], line: int) -> DecodeStep:
        seqs = tuple(_ints("seq", ids) for ids in record["seq"])
        tokens, pos = record["tokens"], record["pos"]
        if tokens is not None and len(tokens) != len(seqs):
            raise ValueError(f"{len(tokens)} tokens have the sequences of {len(seqs)}")
        if pos is not None and len(np.array(pos, np.int32).T) != len(seqs):
            raise ValueError(f"pos must hold one position for each of {len(seqs)} tokens")
        out, outside = _ints("out", record["out"]), _ints("outside", record.get("outside", ()))
        if any(not 0 <= i < len(seqs) for i in (*out, *outside)):
            raise ValueError(f"out and outside must name some of {len(seqs)} tokens")
        return cls(
            tokens=None if tokens is None else _ints("tokens", tokens),
            pos=pos,
            seqs_by_token=seqs,
            out=out,
            outside=outside,
            embd=_ints("embd", [record.get("embd", 0)])[0],
            outcome=Outcome.from_record(record["outcome"]),
            ranges=_ranges(record["seen"]),
            rows=tuple(map(Fingerprint.from_record, record.get("rows", ()))),
            line=line,
        )

    @property
    def seqs(self) -> set[int] | None:
        """The sequences of its tokens."""
        return {seq for ids in self.seqs_by_token for seq in ids}

    def computed(self) -> DecodeStep:
        """Return the part that was computed, if the decode ended half-way; else the step itself."""
        if self.outcome.error not in HALF_WAY or self.pos is None:
            return self
        ends = {seq: last for seq, (_, last) in self.ranges.items()}
        kept = [
            i
            for i, (ids, pos) in enumerate(zip(self.seqs_by_token, self.pos, strict=True))
            if pos <= ends.get(ids[0], -1)
        ]
        return replace(
            self,
            tokens=None if self.tokens is None else tuple(self.tokens[i] for i in kept),
            pos=[self.pos[i] for i in kept],
            seqs_by_token=tuple(self.seqs_by_token[i] for i in kept),
            out=(),
            outcome=Outcome(),
            rows=(),
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
    ValueError, KeyError, TypeError : it is none.
    """
    if record["do"] == "decode":
        return DecodeStep.from_record(record, line)
    if record["do"] in VERBS:
        return VerbStep.from_record(record, line)
    raise ValueError(f"do={record['do']!r} is unknown; known: decode, {', '.join(VERBS)}")


def _plain(arg: object) -> object:
    if arg is None or as_bool(arg) is not None:
        return as_bool(arg)
    number = as_int(arg)
    # JSON holds any integer, but Python refuses to spell those of thousands of digits
    return {"repr": shown(arg)} if number is None or abs(number) >= 2**64 else number


def _seen(ranges: Ranges) -> dict[str, tuple[int, int]]:
    return {str(seq): ends for seq, ends in ranges.items()}


def _ranges(record: Mapping[str, Any]) -> Ranges:
    return {int(seq): (_ints("seen", ends)[0], _ints("seen", ends)[1]) for seq, ends in record.items()}


def _ints(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    if any(type(value) is not int or not -(2**31) <= value < 2**31 for value in values):
        raise ValueError(f"{name}={values!r} must hold whole numbers that an int32 holds")
    return tuple(values)
