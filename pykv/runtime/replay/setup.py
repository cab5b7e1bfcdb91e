"""What runs on a side of a replay: the recorded settings, changed, over a model or over a stand-in for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

from pykv.errors import ParamError
from pykv.ggml import Device, DType, cpu_device, devices, find_device
from pykv.memory import AttentionPlan, MemorySpec
from pykv.memory.kinds import has_states, is_windowed
from pykv.models.spec_record import spec_of
from pykv.models.stand_in import StandIn
from pykv.runtime.context import Context
from pykv.runtime.model import Model
from pykv.runtime.params import CONTEXT_PAD, Attention, ContextParams, FlashAttn, ResolvedParams
from pykv.runtime.replay.side import LiveRun
from pykv.runtime.trace.header import TraceHeader

ModelPath = str | os.PathLike[str]

Settings = dict[str, str | int | bool]
"""What runs on a side, by name."""


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
    attention: Attention | None = None
    reference_moves: bool | None = None
    swa_full: bool | None = None

    @property
    def params(self) -> dict[str, object]:
        """The context parameters among them."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("device", "model")}
        changed = {name: value for name, value in given.items() if value is not None}
        if "flash_attn" in changed or "attention" in changed:
            # either of them replaces both that were recorded
            changed = {"flash_attn": "auto", "attention": "auto"} | changed
        return changed

    def __bool__(self) -> bool:
        return self != Changes()


def open_run(header: TraceHeader, changes: Changes, model: ModelPath | None, n_threads: int | None) -> LiveRun:
    """Return a side that runs what a trace says, with changes.

    Raises
    ------
    ParamError, AllocError, GGUFError : it cannot be set up.
    """
    _check_flash(header, changes)
    params = _padded(replace(header.params, n_threads=n_threads, **changes.params), changes)  # type: ignore[arg-type]
    device = find_device(changes.device) if changes.device is not None else _recorded_device(header)
    path = changes.model or model
    owner: Model | StandIn
    # in this process, whatever the device: what the parts of a memory hold is compared too
    owner = StandIn(header.model.shape, device) if path is None else Model.load(path, device.name, isolate=False)
    try:
        # a stand-in offers to a context what a model does
        context = Context(cast("Model", owner), params, _attention(header, changes, params.type_v))
    except BaseException:
        owner.close()
        raise
    return LiveRun(context, header, owner.close)


def _check_flash(header: TraceHeader, changes: Changes) -> None:
    is_quantized = changes.type_v is not None and DType.parse(changes.type_v, "type_v").is_quantized
    is_plain = header.params.flash_attn is False or header.params.attention == "matmul"
    if is_quantized and is_plain and "attention" not in changes.params:
        raise ParamError(
            f"type_v={changes.type_v!r} needs flash attention, and the trace was recorded without: give flash_attn=True"
        )


def _padded(params: ContextParams, changes: Changes) -> ContextParams:
    """Round a new size up to whole shares, before it limits the batch: the recorded batches shall still fit."""
    if not changes.n_ctx:
        return params
    n_seq = 1 if params.kv_unified else max(1, params.n_seq_max)
    share = -(-params.n_ctx // (CONTEXT_PAD * n_seq)) * CONTEXT_PAD
    return replace(params, n_ctx=share * n_seq)


def _recorded_device(header: TraceHeader) -> Device:
    here = {device.name: device for device in devices()}
    return next((here[name] for name in header.devices if name in here), cpu_device())


def _attention(header: TraceHeader, changes: Changes, type_v: str | DType) -> AttentionPlan | None:
    """Return the recorded plan, which measuring might not find again, wherever it can still be followed."""
    if "attention" in changes.params or (changes.type_v is not None and DType.parse(type_v, "type_v").is_quantized):
        return None
    return header.attention


def described(run: LiveRun, path: ModelPath | None) -> Settings:
    """Return what runs on a side, by name."""
    context = run.context
    names = dict.fromkeys(device.name for device in context.model.placement.layers)
    return {"model": "stand-in" if path is None else Path(path).name, "device": ", ".join(names)} | _settings(
        context.params, context.attention, context.memory.spec
    )


def recorded(header: TraceHeader) -> Settings:
    """Return what ran when the trace was recorded, by name."""
    model = header.model.file or header.model.architecture
    return {"model": model, "device": ", ".join(header.devices)} | _settings(
        header.params, header.attention, spec_of(header.model.shape.spec)
    )


def _settings(params: ContextParams | ResolvedParams, attention: AttentionPlan, spec: MemorySpec) -> Settings:
    names = ["n_ctx", "n_batch", "n_ubatch", "n_seq_max", "kv_unified", "type_k", "type_v", "reference_moves"]
    names += ["swa_full"] * is_windowed(spec) + ["n_rs_seq"] * has_states(spec)
    shown = {name: getattr(params, name) for name in names}
    shown["attention"] = " and ".join(attention.names)
    return {name: value.label if isinstance(value, DType) else value for name, value in shown.items()}


def effects(changes: Changes, first: Settings, second: Settings) -> list[str]:
    """Return sentences on changes that came to something else than they say."""
    notes = []
    for name in (f.name for f in fields(changes) if getattr(changes, f.name) is not None):
        shown = "attention" if name == "flash_attn" else name
        if shown not in first:
            notes.append(f"{name}: no layer has a window, so that this changes nothing")
            continue
        if name == "n_ctx" and changes.n_ctx not in (0, second[name]):
            notes.append(f"n_ctx: {changes.n_ctx} is rounded up to {second[name]}")
        if name != "model" and first[shown] == second[shown]:
            notes.append(f"{name}: both sides have {first[shown]}, so that this changes nothing")
    return notes
