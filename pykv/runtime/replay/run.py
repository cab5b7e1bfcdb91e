"""Run a trace again, on two sides in lockstep, and find the first step after which they differ.

The second side is the same with what the caller changed; where nothing was changed, it is the recording itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from pykv.errors import ParamError, TraceError
from pykv.runtime.replay.difference import Difference
from pykv.runtime.replay.distance import Distances
from pykv.runtime.replay.left_out import left_out, things
from pykv.runtime.replay.lockstep import Lockstep
from pykv.runtime.replay.setup import Changes, ModelPath, Settings, described, effects, open_run, recorded
from pykv.runtime.replay.side import Cells, LiveRun, Recording, Side
from pykv.runtime.replay.tolerance import Tolerance
from pykv.runtime.trace.file import TraceFile
from pykv.runtime.trace.header import TraceHeader
from pykv.typing import as_number


@dataclass
class Report:
    """How a replay went.

    Attributes
    ----------
    n_steps, n_done : steps of the trace, and how many were run.
    first, second : what ran on each side, by name.
    is_recording : the second side is the recording.
    things : what can be compared.
    left_out : what of it was not compared, and why.
    notes : changes that came to something else than they seem to say.
    distances : how far rows lay apart, and up to which distance they count as equal.
    difference : the first, None if there is none.
    cells : of each side that ran, the cells at the end, by part and stream.
    """

    n_steps: int
    first: Settings
    second: Settings
    is_recording: bool
    things: tuple[str, ...]
    left_out: dict[str, str]
    notes: list[str]
    distances: Distances
    n_done: int = 0
    difference: Difference | None = None
    cells: list[Cells] = field(default_factory=list)

    @property
    def compared(self) -> list[str]:
        """What was compared."""
        return [thing for thing in self.things if thing not in self.left_out]


def replay(
    trace: TraceFile,
    changes: Changes | None = None,
    *,
    model: ModelPath | None = None,
    tolerance: float | None = None,
    n_threads: int | None = None,
    on_step: Callable[[int], None] | None = None,
) -> Report:
    """Run a trace again and return where its two sides differ first.

    Parameters
    ----------
    changes : what the second side does otherwise; None = compare with what was recorded.
    model : a GGUF file that both sides run; None = a stand-in with the same memory, whose logits mean nothing.
    tolerance : NMSE up to which a row of K, V or logits counts as equal; None = what the element types explain, or
        against a recording what another machine does.
    n_threads : CPU threads of each side; None = all cores.
    on_step : called after each step with how many are done.

    Raises
    ------
    TraceError : the trace holds no step.
    ParamError, AllocError, GGUFError : a side cannot be set up.
    """
    changes, header = changes or Changes(), trace.header
    _check(trace, changes, model)
    limit = _limit(tolerance)
    with ExitStack() as stack:
        first = stack.enter_context(closing(open_run(header, Changes(), model, n_threads)))
        second: LiveRun | Recording = Recording(first.window)
        if changes:
            second = stack.enter_context(closing(open_run(header, changes, model, n_threads)))
        distances = Distances(limit or _tolerance(header, first, second, model is not None))
        report = Report(
            n_steps=len(trace.steps),
            first=described(first, model),
            second=described(second, changes.model or model) if isinstance(second, LiveRun) else recorded(header),
            is_recording=isinstance(second, Recording),
            things=things(first),
            left_out=left_out(header, first, second),
            notes=[],
            distances=distances,
        )
        report.notes = effects(changes, report.first, report.second)
        _run(trace, Lockstep(first, second, distances, tuple(report.left_out)), report, on_step)
        if not distances.n_rows:
            report.left_out.setdefault("logits", "there were none")
        report.cells = [run.cells() for run in (first, second) if isinstance(run, LiveRun)]
        return report


def _run(trace: TraceFile, pair: Lockstep, report: Report, on_step: Callable[[int], None] | None) -> None:
    """Run the steps up to the first difference; fills in the report."""
    for number, step in enumerate(trace.steps, start=1):
        report.difference = pair.do(number, step)
        report.n_done = number
        if on_step is not None:
            on_step(number)
        if report.difference is not None:
            return
    report.difference = pair.finish(len(trace.steps))


def _check(trace: TraceFile, changes: Changes, model: ModelPath | None) -> None:
    if not trace.steps:
        why = "" if trace.ended is None else f"; it ended early: {trace.ended}"
        raise TraceError(f"{trace.path}: the trace holds no step{why}")
    if changes.model is not None and model is None:
        raise ParamError(f"model=None leaves nothing that {os.fspath(changes.model)!r} could be compared with")


def _limit(tolerance: float | None) -> Tolerance | None:
    if tolerance is None:
        return None
    limit = as_number(tolerance)
    if limit is None or limit < 0:
        raise ParamError(f"tolerance={tolerance!r} must be a number, not negative")
    return Tolerance(limit, limit)


def _tolerance(header: TraceHeader, first: LiveRun, second: Side, is_model: bool) -> Tolerance:
    here = {device.name for device in first.context.model.placement.layers}
    if isinstance(second, Recording) and here == set(header.devices):
        return Tolerance.of_recording(is_model=is_model)
    params = [side.context.params for side in (first, second) if isinstance(side, LiveRun)]
    return Tolerance.of(*(dtype for one in params for dtype in (one.type_k, one.type_v)), is_model=is_model)
