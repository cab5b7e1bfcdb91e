"""Make a program shorter and plainer for as long as it shows what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from support.verb_program import Step

Shows = Callable[[Sequence[Step]], bool]


def shrink(program: Sequence[Step], shows: Shows) -> list[Step]:
    """Return a program that `shows` still, but no longer with one step less or with one step plainer."""
    steps, before = list(program), None
    while steps != before:
        before = steps
        steps = _with_fewer_steps(steps, shows)
        steps = _with_plainer_steps(steps, shows)
    return steps


def _with_fewer_steps(steps: list[Step], shows: Shows) -> list[Step]:
    size = max(1, len(steps) // 2)
    while True:
        i, n = 0, len(steps)
        while i < len(steps):
            shorter = steps[:i] + steps[i + size :]
            if shows(shorter):
                steps = shorter
            else:
                i += size
        if size == 1 and len(steps) == n:
            return steps
        size = max(1, size // 2)


def _with_plainer_steps(steps: list[Step], shows: Shows) -> list[Step]:
    for i in range(len(steps)):
        is_plain = False
        while not is_plain:
            is_plain = True
            for step in _plainer(steps[i]):
                if shows(tried := [*steps[:i], step, *steps[i + 1 :]]):
                    steps, is_plain = tried, False
                    break
    return steps


def _plainer(step: Step) -> Iterator[Step]:
    """Yield steps that have one sequence less, or one draw at 0, where a draw asks for the least."""
    if step.do == "extend" and len(step.seqs) > 1:
        for seq_id in step.seqs:
            yield replace(step, seqs=tuple(s for s in step.seqs if s != seq_id))
    for i, draw in enumerate(step.draws):
        if draw:
            yield replace(step, draws=(*step.draws[:i], 0, *step.draws[i + 1 :]))
