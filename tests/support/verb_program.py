"""Random programs of decodes and sequence verbs, and the calls that they come to.

A program is a list of abstract steps. What a step calls is decided when it runs, from the positions that the
sequences hold then, and from nothing else: a program that lost some of its steps still makes sense.

    Step("slide", (1,), draws)   →   seq_rm(1, 4, 7), seq_add(1, 7, -1, -3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

Call = dict[str, Any]
"""One call as a line of a trace: ``{"do": "seq_rm", "args": [...]}``, or "decode" with tokens, pos, seq, out."""

N_DRAWS = 8
FAR = 3000
"""Positions stay below: rotation by far larger angles only measures how exact sines are."""


@dataclass(frozen=True)
class Step:
    """What to do and to which sequences; `draws` are numbers that are taken modulo whatever is possible then.

    A draw of 0 asks for the least: one token, one place, the whole range.
    """

    do: str
    seqs: tuple[int, ...]
    draws: tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """What a program can count on: sequences, tokens of a batch, vocabulary, and whether parts can be copied."""

    n_seqs: int
    n_batch: int
    n_vocab: int
    copies_parts: bool


@dataclass(frozen=True)
class State:
    """Where each sequence begins and ends, (-1, -1) if it is empty, and the room there is."""

    ends: tuple[tuple[int, int], ...]
    room: Room

    def next(self, seq_id: int) -> int:
        """Return the position that continues a sequence."""
        return self.ends[seq_id][1] + 1

    def span(self, seq_id: int) -> tuple[int, int]:
        """Return where a verb's range may begin and end, also for an empty sequence."""
        lo, hi = self.ends[seq_id]
        return (lo, hi) if hi >= 0 else (0, 3)


def draw_program(rng: Random, room: Room) -> list[Step]:
    """Return 5 to 60 steps, which begin with something stored."""
    n_steps = rng.randint(5, rng.choice((15, 25, 60)))
    kinds = ["extend", *rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=n_steps - 1)]
    return [_draw_step(rng, kind, room.n_seqs) for kind in kinds]


def resolve(step: Step, state: State) -> list[Call]:
    """Return what a step calls, in order."""
    return RESOLVERS[step.do](step, state)


def _draw_step(rng: Random, kind: str, n_seqs: int) -> Step:
    seqs = rng.sample(range(n_seqs), rng.randint(1, n_seqs) if kind == "extend" else n_seqs)
    return Step(kind, tuple(seqs), tuple(rng.getrandbits(16) for _ in range(N_DRAWS)))


# decodes


def _extend(step: Step, state: State) -> list[Call]:
    """Continue one or several sequences in one batch."""
    most = 8 if len(step.seqs) == 1 else 4
    runs = [_run(state, s, 1 + step.draws[i] % most, step.draws[7]) for i, s in enumerate(step.seqs)]
    if step.draws[5] % 12 == 11:
        runs[0].append(runs[0][-1])  # two tokens at one position are no gap
    return [_decode(step, state, _mixed(runs, step.draws[6]))]


def _generate(step: Step, state: State) -> list[Call]:
    """Continue some sequences together, one token each at a time: graphs are used again."""
    seqs = step.seqs[: 1 + step.draws[0] % len(step.seqs)]
    rounds = [[(state.next(s) + i, (s,)) for s in seqs] for i in range(1 + step.draws[1] % 4)]
    seeds = [replace(step, draws=(*step.draws[:4], step.draws[4] + i, *step.draws[5:])) for i in range(len(rounds))]
    return [_decode(seed, state, entries) for seed, entries in zip(seeds, rounds, strict=True)]


def _couple(step: Step, state: State) -> list[Call]:
    """Continue two sequences by the same tokens; refused unless they begin and end together."""
    ids = tuple(sorted(step.seqs[:2]))
    return [_decode(step, state, [(p, ids) for p, _ in _run(state, ids[0], 1 + step.draws[0] % 4, step.draws[7])])]


def _fill(step: Step, state: State) -> list[Call]:
    """Decode many tokens at once, now and then more than there is room for."""
    n = 20 + step.draws[0] % 80 if step.draws[1] % 4 < 3 else state.room.n_batch - step.draws[0] % 100
    return [_decode(step, state, _run(state, step.seqs[0], n, 1))]


def _wrong(step: Step, state: State) -> list[Call]:
    """Decode what must be refused: a gap, an overlap, a wrong order, an unknown token."""
    a, b, *_ = step.draws
    s = step.seqs[0]
    run = _run(state, s, 2 + b % 3, step.draws[7])
    kind = a % 5
    if kind == 0:
        run = [(p + 1 + b % 3, ids) for p, ids in run]
    elif kind == 1:
        run = [(max(0, p - 1 - b % 3), ids) for p, ids in run]
    elif kind == 2:
        run = [*run[:-1], (run[-1][0] + 1 + b % 3, (s,))]
    elif kind == 3:
        run.reverse()
    call = _decode(step, state, run)
    if kind == 4:
        call["tokens"][b % len(run)] = (-1, state.room.n_vocab)[b % 2]
    return [call]


def _run(state: State, seq_id: int, n: int, start: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return n positions that continue a sequence; an empty one now and then begins anywhere."""
    first = state.next(seq_id)
    if first == 0 and start % 8 == 0:
        first = start // 8 % 50
    return [(first + i, (seq_id,)) for i in range(n)]


def _mixed(runs: list[list[Any]], draw: int) -> list[Any]:
    """Return runs one behind the other, in turns, or shuffled with each run's order kept."""
    order = [i for i, run in enumerate(runs) for _ in run]
    if draw % 3 == 1:
        order = [i for k in range(max(map(len, runs))) for i, run in enumerate(runs) if k < len(run)]
    elif draw % 3 == 2:
        Random(draw).shuffle(order)
    rest = [iter(run) for run in runs]
    return [next(rest[i]) for i in order]


def _decode(step: Step, state: State, entries: Sequence[tuple[int, tuple[int, ...]]]) -> Call:
    rng, n, wanted = Random(step.draws[4]), len(entries), step.draws[3] % 8
    flags = [wanted < 6 or rng.random() < 0.5 for _ in range(n)]
    if wanted < 2:
        flags = [False] * (n - 1) + [wanted == 0]
    return {
        "do": "decode",
        "tokens": [rng.randrange(state.room.n_vocab) for _ in range(n)],
        "pos": [p for p, _ in entries],
        "seq": [list(ids) for _, ids in entries],
        "out": flags,
    }


# verbs


def _verb(name: str, *args: int | bool) -> Call:
    return {"do": name, "args": list(args)}


def _remove(step: Step, state: State) -> list[Call]:
    return [_verb("seq_rm", step.seqs[0], *_range(state.span(step.seqs[0]), step.draws))]


def _remove_of_all(step: Step, state: State) -> list[Call]:
    p0, p1 = _range(state.span(step.seqs[0]), step.draws)
    return [_verb("seq_rm", -1, p0, p1)]


def _copy(step: Step, state: State) -> list[Call]:
    """Copy a range, or all: mostly the only thing that can be done across streams."""
    src, dst = step.seqs[0], step.seqs[step.draws[4] % len(step.seqs)]
    whole = step.draws[5] % 2 == 0 if state.room.copies_parts else step.draws[5] % 16 > 0
    p0, p1 = (-1, -1) if whole else _range(state.span(src), step.draws)
    return [_verb("seq_cp", src, dst, p0, p1)]


def _fork(step: Step, state: State) -> list[Call]:
    """Make a sequence what another one is."""
    src, dst = step.seqs[0], step.seqs[-1]
    if src == dst:
        return []
    return [_verb("seq_rm", dst, -1, -1), _verb("seq_cp", src, dst, -1, -1)]


def _keep(step: Step, state: State) -> list[Call]:
    return [_verb("seq_keep", step.seqs[0])]


def _add(step: Step, state: State) -> list[Call]:
    lo, hi = span = state.span(step.seqs[0])
    a, size = step.draws[3], step.draws[4]
    delta = (1 + size % 8, -1 - size % 8, -lo, -lo - 1 - size % 6, 40 + size % 900, 0)[
        (0, 1, 0, 1, 1, 2, 3, 4, 5)[a % 9]
    ]
    if hi + delta > FAR:
        delta = -(hi // 2)
    return [_verb("seq_add", step.seqs[0], *_range(span, step.draws), delta)]


def _slide(step: Step, state: State) -> list[Call]:
    """Drop some positions and close the gap: a context shift."""
    lo, hi = state.span(step.seqs[0])
    p0 = lo + step.draws[0] % (hi - lo + 1)
    p1 = p0 + 1 + step.draws[1] % 6
    return [_verb("seq_rm", step.seqs[0], p0, p1), _verb("seq_add", step.seqs[0], p1, -1, p0 - p1)]


def _div(step: Step, state: State) -> list[Call]:
    return [
        _verb(
            "seq_div", step.seqs[0], *_range(state.span(step.seqs[0]), step.draws), (2, 3, 4, 7, 1)[step.draws[3] % 5]
        )
    ]


def _clear(step: Step, state: State) -> list[Call]:
    return [_verb("clear", step.draws[0] % 2 == 0)]


def _range(span: tuple[int, int], draws: Sequence[int]) -> tuple[int, int]:
    """Return a range: all, an end of it, a part in the middle, nothing, or what lies beyond."""
    lo, hi = span
    x, y = sorted(lo + draw % (hi - lo + 2) for draw in draws[:2])
    shapes = ((-1, -1), (-1, y), (x, -1), (x, -1), (x, y), (x, y + 1), (y, x), (hi + 1, -1), (0, hi + 100))
    return shapes[draws[2] % len(shapes)]


WEIGHTS: dict[str, int] = {
    "extend": 32,
    "generate": 12,
    "couple": 3,
    "fill": 1,
    "wrong": 3,
    "remove": 9,
    "remove_of_all": 2,
    "copy": 8,
    "fork": 5,
    "keep": 3,
    "add": 10,
    "slide": 5,
    "div": 5,
    "clear": 1,
}
"""How often each kind of step is drawn; half of the calls are decodes, so that most changes are looked at."""

RESOLVERS: dict[str, Callable[[Step, State], list[Call]]] = {
    "extend": _extend,
    "generate": _generate,
    "couple": _couple,
    "fill": _fill,
    "wrong": _wrong,
    "remove": _remove,
    "remove_of_all": _remove_of_all,
    "copy": _copy,
    "fork": _fork,
    "keep": _keep,
    "add": _add,
    "slide": _slide,
    "div": _div,
    "clear": _clear,
}
