"""Run a trace again, on two sides in lockstep, and find the first step after which they differ.

The second side is the same with what the caller changed; where nothing was changed, it is the recording itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from pykv.cells import CellsView
from pykv.errors import ParamError, TraceError
from pykv.runtime.replay.difference import Difference
from pykv.runtime.replay.lockstep import Lockstep
from pykv.runtime.replay.setup import Changes, ModelPath, described, knows_logits, open_run, recorded
from pykv.runtime.replay.side import LiveRun, Recording
from pykv.runtime.replay.tolerance import Tolerance
from pykv.runtime.trace.file import TraceFile
from pykv.runtime.trace.step import VerbStep
from pykv.typing import as_number

__all__ = ["Changes", "Report", "replay"]


@dataclass
class Report:
    """How a replay went.

    Attributes
    ----------
    n_steps, n_done : steps of the trace, and how many were run.
    first, second : what ran on each side, by name.
    is_recording : the second side is the recording.
    has_logits : whether logits were compared.
    tolerance : up to which rows count as equal.
    difference : the first, None if there is none.
    cells : of each side that ran, the cells of each stream at the end.
    """

    n_steps: int
    first: dict[str, str]
    second: dict[str, str]
    is_recording: bool
    has_logits: bool
    tolerance: Tolerance
    n_done: int = 0
    difference: Difference | None = None
    cells: list[list[CellsView]] = field(default_factory=list)


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
    tolerance : NMSE up to which a row of K, V or logits counts as equal; None = what the element types explain.
    n_threads : CPU threads of each side; None = all cores.
    on_step : called after each step with how many are done.

    Raises
    ------
    TraceError : the trace cannot be run from an empty memory.
    ParamError, AllocError, GGUFError : a side cannot be set up.
    """
    _check_start(trace)
    changes = changes or Changes()
    limit = None if tolerance is None else as_number(tolerance)
    if tolerance is not None and (limit is None or limit < 0):
        raise ParamError(f"tolerance={tolerance!r} must be a number, not negative")
    if changes.model is not None and model is None:
        raise ParamError(f"other model {changes.model}: it is compared with another one; give --model too")
    header = trace.header
    with ExitStack() as stack:
        first = stack.enter_context(closing(open_run(header, Changes(), model, n_threads)))
        second: LiveRun | Recording = Recording(first.context.memory.spec.window, knows_logits(header, first.context))
        if changes:
            second = stack.enter_context(closing(open_run(header, changes, model, n_threads)))
        live = [run for run in (first, second) if isinstance(run, LiveRun)]
        types = [dtype for run in live for dtype in (run.context.params.type_k, run.context.params.type_v)]
        if limit is None:
            allowed = Tolerance.of(*types, is_model=model is not None)
        else:
            allowed = Tolerance(limit, limit)
        report = Report(
            n_steps=len(trace.steps),
            first=described(first, model),
            second=described(second, changes.model or model) if isinstance(second, LiveRun) else recorded(header),
            is_recording=isinstance(second, Recording),
            has_logits=second.knows_logits if isinstance(second, Recording) else _are_alike(first, second),
            tolerance=allowed,
        )
        _run(trace, Lockstep(first, second, allowed), report, on_step)
        report.cells = [run.cells() for run in live]
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


def _are_alike(first: LiveRun, second: LiveRun) -> bool:
    """Tell whether both compute logits of the same tokens."""
    return first.context.model.hparams.n_vocab == second.context.model.hparams.n_vocab


def _check_start(trace: TraceFile) -> None:
    first = trace.steps[0] if trace.steps else None
    if trace.header.start and not (isinstance(first, VerbStep) and first.name == "clear"):
        held = ", ".join(f"sequence {seq} at {a}..{b}" for seq, (a, b) in trace.header.start.items())
        raise TraceError(
            f"{trace.path}: recording began in a memory that held {held}, which the trace does not tell how; start it "
            "before the first decode, or clear() the memory first thing"
        )
