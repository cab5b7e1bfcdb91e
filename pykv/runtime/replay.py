"""Run a trace again, on two sides in lockstep, and find the first step after which they differ.

The second side is the same with what the caller changed; where nothing was changed, it is the recording itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import cast

from pykv.cells import CellsView
from pykv.errors import ParamError, TraceError
from pykv.ggml import Device, DType, cpu_device, devices, find_device
from pykv.memory import AttentionPlan
from pykv.models.stand_in import StandIn
from pykv.runtime.context import Context
from pykv.runtime.difference import (
    Difference,
    Found,
    differ_in_cells,
    differ_in_ends,
    differ_in_logits,
    differ_in_outcome,
    differ_in_rows,
    tolerance_of,
)
from pykv.runtime.model import Model
from pykv.runtime.params import FlashAttn
from pykv.runtime.replay_side import LiveRun, Recording, Side
from pykv.runtime.trace_file import TraceFile, TraceHeader
from pykv.runtime.trace_step import DecodeStep, Step, VerbStep
from pykv.typing import as_number

ModelPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Changes:
    """What the second side does otherwise; None = as recorded."""

    device: str | None = None
    model: ModelPath | None = None
    n_ctx: int | None = None
    n_ubatch: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    kv_unified: bool | None = None
    flash_attn: FlashAttn | None = None
    reference_moves: bool | None = None

    @property
    def params(self) -> dict[str, object]:
        """The context parameters among them."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("device", "model")}
        return {name: value for name, value in given.items() if value is not None}

    def __bool__(self) -> bool:
        return self != Changes()


@dataclass
class Report:
    """How a replay went.

    Attributes
    ----------
    n_steps, n_done : steps of the trace, and how many were run.
    first, second : what ran on each side, by name.
    is_recording : the second side is the recording.
    has_logits : whether logits were compared.
    tolerance : NMSE up to which rows count as equal.
    difference : the first, None if there is none.
    cells : of each side that ran, the cells of each stream at the end.
    """

    n_steps: int
    first: dict[str, str]
    second: dict[str, str]
    is_recording: bool
    has_logits: bool
    tolerance: float
    n_done: int = 0
    difference: Difference | None = None
    cells: list[list[CellsView]] = field(default_factory=list)


def replay(
    trace: TraceFile,
    changes: Changes = Changes(),
    *,
    model: ModelPath | None = None,
    tolerance: float | None = None,
    n_threads: int | None = None,
    on_step: Callable[[int], None] | None = None,
) -> Report:
    """Run a trace again and return where its two sides differ first.

    Parameters
    ----------
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
    limit = None if tolerance is None else as_number(tolerance)
    if tolerance is not None and (limit is None or limit < 0):
        raise ParamError(f"tolerance={tolerance!r} must be a number, not negative")
    header = trace.header
    with ExitStack() as stack:
        first = _live(header, Changes(), model, n_threads)
        stack.callback(first.close)
        second: Side
        if changes:
            second = _live(header, changes, model, n_threads)
            stack.callback(second.close)
            live = [first, second]
        else:
            second = Recording(first.context.memory.spec.window, _knows_logits(header, first.context))
            live = [first]
        types = [dtype for run in live for dtype in (run.context.params.type_k, run.context.params.type_v)]
        pair = _Pair(first, second, tolerance_of(*types) if limit is None else limit)
        report = Report(
            n_steps=len(trace.steps),
            first=_described(first, model),
            second=_described(second, changes.model or model) if isinstance(second, LiveRun) else _recorded(header),
            is_recording=not changes,
            has_logits=isinstance(second, LiveRun) or second.knows_logits,
            tolerance=pair.tolerance,
        )
        for number, step in enumerate(trace.steps, start=1):
            found = pair.do(step)
            report.n_done = number
            if on_step is not None:
                on_step(number)
            if found is not None:
                report.difference = found.at(number, step)
                break
        else:
            found = pair.compare_rest()
            report.difference = None if found is None else found.at(len(trace.steps) + 1, None)
        report.cells = [run.cells() for run in live]
        return report


class _Pair:
    """Two sides, and the sequences whose K and V have not been compared since they changed.

    They are compared after decodes only: reading them carries out pending moves, and moves that pile up shall do so
    here too.
    """

    def __init__(self, first: LiveRun, second: Side, tolerance: float) -> None:
        self.first, self.second, self.tolerance = first, second, tolerance
        self._all = set(range(first.context.params.n_seq_max))
        self._touched: set[int] = set()

    def do(self, step: Step) -> Found | None:
        """Run a step on both sides and compare."""
        first, second = self.first, self.second
        if isinstance(step, DecodeStep):
            step = step.computed()
            if not step.seqs_by_token and step.outcome.error is None:
                return None  # it ended before anything was computed
        outcome = first.do(step)
        found = differ_in_outcome(outcome, second.do(step)) or differ_in_ends(first, second)
        if found is not None or not isinstance(second, LiveRun):
            return found or differ_in_logits(first, second, self.tolerance)
        touched = self._all if step.seqs is None else self._all & step.seqs
        self._touched |= touched
        found = differ_in_cells(first, second, touched)
        if found is not None or isinstance(step, VerbStep) or outcome.error is not None:
            return found
        return self.compare_rest() or differ_in_logits(first, second, self.tolerance)

    def compare_rest(self) -> Found | None:
        """Compare K and V of the sequences that have changed."""
        if not isinstance(self.second, LiveRun):
            return None
        touched, self._touched = self._touched, set()
        return differ_in_rows(self.first, self.second, touched, self.tolerance)


def _check_start(trace: TraceFile) -> None:
    first = trace.steps[0] if trace.steps else None
    if trace.header.start and not (isinstance(first, VerbStep) and first.name == "clear"):
        held = ", ".join(f"sequence {seq} at {a}..{b}" for seq, (a, b) in trace.header.start.items())
        raise TraceError(
            f"{trace.path}: recording began in a memory that held {held}, which the trace does not tell how; start it "
            "before the first decode, or clear() the memory first thing"
        )


def _live(header: TraceHeader, changes: Changes, model: ModelPath | None, n_threads: int | None) -> LiveRun:
    params = replace(header.params, n_threads=n_threads, **changes.params)  # type: ignore[arg-type]
    device = find_device(changes.device) if changes.device is not None else _recorded_device(header)
    path = changes.model or model
    owner: Model | StandIn
    owner = StandIn(header.model.shape, device) if path is None else Model.load(path, device.name)
    try:
        # a stand-in offers to a context what a model does
        context = Context(cast("Model", owner), params, _attention(header, changes, params.type_v))
    except BaseException:
        owner.close()
        raise
    return LiveRun(context, header, owner.close)


def _recorded_device(header: TraceHeader) -> Device:
    here = {device.name: device for device in devices()}
    return next((here[name] for name in header.devices if name in here), cpu_device())


def _attention(header: TraceHeader, changes: Changes, type_v: str | DType) -> AttentionPlan | None:
    """Return the recorded plan, which measuring might not find again, wherever it can still be followed."""
    if changes.flash_attn is not None or (changes.type_v is not None and DType.parse(type_v, "type_v").is_quantized):
        return None
    return header.attention


def _knows_logits(header: TraceHeader, context: Context) -> bool:
    """Tell whether the context computes the logits that were recorded."""
    hp, noted = context.model.hparams, header.model
    return (
        header.has_tokens
        and (hp.architecture, hp.n_vocab) == (noted.architecture, noted.n_vocab)
        and hp.n_head_by_layer == noted.shape.n_head_by_layer
    )


def _described(run: LiveRun, path: ModelPath | None) -> dict[str, str]:
    """Return what runs on a side, by name."""
    context = run.context
    names = dict.fromkeys(device.name for device in context.model.placement.layers)
    return {"model": "stand-in" if path is None else Path(path).name, "device": ", ".join(names)} | _settings(
        context.params, context.attention
    )


def _recorded(header: TraceHeader) -> dict[str, str]:
    model = header.model.file or header.model.architecture
    return {"model": model, "device": ", ".join(header.devices)} | _settings(header.params, header.attention)


def _settings(params: object, attention: AttentionPlan) -> dict[str, str]:
    names = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "kv_unified", "type_k", "type_v", "reference_moves")
    shown = {name: getattr(params, name) for name in names if hasattr(params, name)}
    shown["attention"] = attention.many.value
    return {name: value.label if isinstance(value, DType) else str(value) for name, value in shown.items()}
