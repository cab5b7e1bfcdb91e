"""Programs: what is done on every device, step by step. One that is made up, or a trace that was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykv.batch import Batch
from pykv.cells import SwaType
from pykv.errors import ParamError
from pykv.memory import MemorySpec
from pykv.memory.kinds import has_states
from pykv.runtime import Context
from pykv.runtime.trace import TraceFile
from pykv.runtime.trace.step import DecodeStep, VerbStep
from pykv.typing import as_int

PROMPT, SECOND_PROMPT = 135, 70
"""Tokens of the prompts that are made up: several ubatches of the usual small size, and a rest."""
LONGEST_PROMPT = 1000
"""Tokens of a prompt that goes on until a window has passed, at most."""
N_SEQ = 2
SEED = 7


@dataclass(frozen=True)
class Decode:
    """A batch, all of whose logits are wanted.

    Attributes
    ----------
    pos : positions, None = behind what is stored.
    seqs : the sequences of each token.
    """

    tokens: tuple[int, ...]
    pos: Any
    seqs: tuple[tuple[int, ...], ...]

    @property
    def touched(self) -> tuple[int, ...]:
        """The sequences that it changes."""
        return tuple(sorted({seq for ids in self.seqs for seq in ids}))

    def batch(self) -> Batch:
        """Return what is decoded."""
        return Batch(np.array(self.tokens, np.int64), self.pos, [list(ids) for ids in self.seqs], logits="all")

    def __str__(self) -> str:
        return f"decode of {len(self.tokens)} in sequence {', '.join(map(str, self.touched))}"


@dataclass(frozen=True)
class Verb:
    """A verb of the memory."""

    name: str
    args: tuple[Any, ...]

    def do(self, context: Context) -> None:
        """Call it, and carry out what it leaves to be done."""
        getattr(context.memory, self.name)(*self.args)
        context.memory.update()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"


Program = tuple[Decode | Verb, ...]


def made_up(spec: MemorySpec, can_shift: bool, n_vocab: int, tokens: Sequence[int] | None = None) -> Program:
    """Return a program that does all that a memory can: prompts, single tokens, two sequences at once, copies, cuts,
    moves, and a window that passes.

    Parameters
    ----------
    tokens : what is said, over and over; None = ids from all over the vocabulary, always the same.
    """
    said = _Said(n_vocab, tokens)
    window = spec.window.n_swa if spec.window.type is not SwaType.NONE else 0
    n = max(PROMPT, min(window + PROMPT // 2, LONGEST_PROMPT))
    first: list[Decode | Verb] = [said.tokens(n, 0), *(said.tokens(1, 0) for _ in range(3))]
    forked: list[Decode | Verb] = [Verb("seq_cp", (0, 1, -1, -1)), *(said.both() for _ in range(2))]
    moved: list[Decode | Verb] = []
    if can_shift and not has_states(spec):
        moved = [Verb("seq_rm", (0, 20, 40)), Verb("seq_add", (0, 40, -1, -20))]
    last = [said.tokens(1, 0), said.tokens(SECOND_PROMPT, 1), said.both()]
    return (*first, *forked, *moved, *last)


class _Said:
    """Tokens, one after the other."""

    def __init__(self, n_vocab: int, tokens: Sequence[int] | None) -> None:
        if tokens is None:
            self._ids = np.random.default_rng(SEED).integers(0, n_vocab, 4096).tolist()
        else:
            self._ids = [_token(one, n_vocab) for one in tokens]
        if not self._ids:
            raise ParamError("tokens=[] must be at least one token")
        self._at = 0

    def tokens(self, n: int, seq: int) -> Decode:
        return Decode(self._next(n), None, ((seq,),) * n)

    def both(self) -> Decode:
        return Decode(self._next(N_SEQ), None, tuple((seq,) for seq in range(N_SEQ)))

    def _next(self, n: int) -> tuple[int, ...]:
        ids = tuple(self._ids[(self._at + i) % len(self._ids)] for i in range(n))
        self._at += n
        return ids


def _token(one: object, n_vocab: int) -> int:
    token = as_int(one)
    if token is None or not 0 <= token < n_vocab:
        raise ParamError(f"tokens: {one!r} is no id below {n_vocab}")
    return token


def recorded(trace: TraceFile, n_vocab: int) -> Program:
    """Return what a trace did, as far as it went well.

    Raises
    ------
    ParamError : it holds no token ids, or those of another vocabulary; or nothing in it went well.
    """
    steps: list[Decode | Verb] = []
    for step in trace.steps:
        if step.outcome.error is not None:
            continue
        if isinstance(step, VerbStep):
            steps.append(Verb(step.name, step.args))
        elif isinstance(step, DecodeStep):
            if step.tokens is None:
                raise ParamError(f"trace={str(trace.path)!r} holds no token ids; record one with tokens=True")
            tokens = tuple(_token(one, n_vocab) for one in step.tokens)
            steps.append(Decode(tokens, step.pos, step.seqs_by_token))
    if not steps:
        raise ParamError(f"trace={str(trace.path)!r} holds no step that went well")
    return tuple(steps)
