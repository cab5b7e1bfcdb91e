"""Plans: measures a model and a context that are only imagined, and looks for what would fit or take less."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pykv.errors import AllocError, ParamError, UnsupportedOpError
from pykv.ggml import Device
from pykv.gguf import GGUFFile
from pykv.memory import AttentionPlan
from pykv.models import HParams, Placement, find_architecture
from pykv.runtime.isolated.where import Asked, Isolate, is_isolated
from pykv.runtime.params import CONTEXT_PAD, ContextParams, context_params
from pykv.runtime.placing import Overrides, PlacementWish
from pykv.runtime.planning.imagined import ContextNeeds, ImaginedModel, context_needs
from pykv.runtime.planning.needs import DeviceNeeds, Plan, Suggestion

_WORTH = 20
"""A suggestion that is not needed saves at least one part of so many."""
_SMALL_UBATCH = 128


def plan(
    path: str | bytes | os.PathLike[str],
    devices: Asked = None,
    n_gpu_layers: int = -1,
    tensor_split: Any = None,
    overrides: Overrides | None = None,
    *,
    repack: bool = True,
    isolate: Isolate = "auto",
    **params: Any,
) -> Plan:
    """Return what a model and a context would take on each device. Reads the head of the file, allocates nothing.

    Weights, K, V and states are exact, and so is scratch memory: ggml measures the largest graphs without allocating
    them. What is real for a moment is the bookkeeping, 23 bytes a cell. With attention="auto" the paths are timed
    first, as a context does it once in a process: that takes and gives back one layer's K and V of 16384 cells at most.
    What a device needs for itself, such as compiled shaders, is not counted.

    Parameters
    ----------
    path : the GGUF file; it may be larger than memory.
    devices, n_gpu_layers, tensor_split, overrides, repack, isolate : as of `Model.load`.
    params : as of `Model.context`.

    Raises
    ------
    GGUFError, UnknownArchitectureError, ParamError : as `Model.load` and `Model.context` do.
    UnsupportedOpError : an operation that none of the devices has.
    AllocError : not even the bookkeeping of so many cells finds room.
    BackendLost : the process that asked a remote device has ended.
    """
    if not isinstance(repack, bool):
        raise ParamError(f"repack={repack!r} must be True or False")
    asked = context_params(**params)
    if is_isolated(isolate, devices, overrides):
        from pykv.runtime.isolated.planned import isolated_plan

        return isolated_plan(path, (devices, n_gpu_layers, tensor_split, overrides), repack, asked)
    wish = PlacementWish.of(devices, n_gpu_layers, tensor_split, overrides)
    with GGUFFile(path) as file:
        find_architecture(file.metadata.typed("general.architecture", str))
        return _Planner(file, wish, repack).plan(asked)


@dataclass(frozen=True)
class _Needs:
    """What one choice of parameters takes."""

    context: ContextNeeds
    devices: tuple[DeviceNeeds, ...]

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    @property
    def totals(self) -> dict[str, int]:
        return {device.name: device.total for device in self.devices}


class _Planner:
    """One file, and what was said about devices."""

    def __init__(self, file: GGUFFile, wish: PlacementWish, repack: bool) -> None:
        self._file, self._wish, self._repack = file, wish, repack
        self._n_layer = HParams.from_gguf(file).n_layer
        self._model = self._imagine(wish, repack)
        self._free = {device: device.memory_free for device in self._model.compute_devices if device.memory_total}
        self._attention: AttentionPlan | None = None  # measured once, for the context that was asked for

    def plan(self, asked: ContextParams) -> Plan:
        found = self._needs(asked)
        largest = self._largest_n_ctx(asked)
        suggestions = sorted(
            self._suggestions(asked, found, largest), key=lambda one: (not one.fits, -max(one.saves.values()))
        )
        params = found.context.params
        return Plan(
            found.devices,
            params.n_ctx,
            params.n_ctx_seq,
            self._model.hparams.n_ctx_train,
            found.context.attention,
            largest,
            tuple(suggestions),
        )

    def _imagine(self, wish: PlacementWish, repack: bool) -> ImaginedModel:
        placement: Placement = wish.over(self._file.tensors, self._n_layer)
        return ImaginedModel.of(self._file, placement, repack=repack)

    def _needs(self, asked: ContextParams, model: ImaginedModel | None = None) -> _Needs:
        model = model or self._model
        context = context_needs(model, asked, self._attention)
        self._attention = context.plan
        return _Needs(context, tuple(self._on(device, model, context) for device in model.compute_devices))

    def _on(self, device: Device, model: ImaginedModel, context: ContextNeeds) -> DeviceNeeds:
        weights = [one for one in model.weights if one.device == device]
        is_host = device.kind == "cpu"
        return DeviceNeeds(
            name=device.name,
            description=device.description,
            weights=sum(one.nbytes for one in weights),
            mapped=sum(one.mapped_nbytes for one in weights),
            kv=context.kv[device],
            states=context.states[device],
            kv_by_buffer_type=dict(context.kv_by_buffer_type.get(device, {})),
            compute=context.compute[device],
            output=4 * model.hparams.n_vocab * context.params.n_seq_max if is_host else 0,
            free=self._free.get(device),
        )

    def _largest_n_ctx(self, asked: ContextParams) -> int:
        """Return the largest context that fits, found by halving."""
        n_seq = max(1, asked.n_seq_max)
        step = CONTEXT_PAD if asked.kv_unified else CONTEXT_PAD * n_seq
        most = -(-self._model.hparams.n_ctx_train * n_seq // step)

        def fits(n_steps: int) -> bool:
            try:
                return self._needs(replace(asked, n_ctx=n_steps * step)).fits
            except (ParamError, AllocError):  # n_seq_max is more than so small a context has outputs for
                return False

        return step * _last(fits, most)

    def _suggestions(self, asked: ContextParams, now: _Needs, largest: int) -> Iterator[Suggestion]:
        tight = {device.name for device in now.devices if not device.fits}
        for change, note in self._changes(asked, now, tight, largest):
            try:
                then = self._changed(asked, change)
            except (ParamError, UnsupportedOpError, AllocError):
                continue
            saves = {name: n_bytes - then.totals.get(name, 0) for name, n_bytes in now.totals.items()}
            least = 1 if tight else sum(now.totals.values()) // _WORTH
            if sum(saves[name] for name in tight or saves) >= max(1, least):
                yield Suggestion(change, saves, then.fits, note)

    def _changes(
        self, asked: ContextParams, now: _Needs, tight: set[str], largest: int
    ) -> Iterator[tuple[dict[str, object], str]]:
        """Yield changes of parameters that may save something, and what they cost."""
        params = now.context.params
        wide = {
            name: kind
            for name, kind in (("type_k", params.type_k), ("type_v", params.type_v))
            if kind.row_size(32) > 34
        }
        if wide and any(now.context.kv.values()):
            yield dict.fromkeys(wide, "q8_0"), "keys and values in 8 bits: slightly less exact"
        if params.n_ubatch > _SMALL_UBATCH:
            yield {"n_ubatch": _SMALL_UBATCH}, "less scratch memory, slower prompts"
        if params.swa_full:
            yield {"swa_full": False}, "windows keep what they read; going back needs snapshots"
        if tight:
            if 0 < largest < params.n_ctx:
                yield {"n_ctx": largest}, "the largest context that fits"
            if self._repack and any(one.nbytes for one in self._model.weights if one.device.kind == "cpu"):
                yield {"repack": False}, "weights stay mapped; slower on this CPU"
            yield from self._moved(asked, tight)

    def _moved(self, asked: ContextParams, tight: set[str]) -> Iterator[tuple[dict[str, object], str]]:
        """Yield changes that take something off a device other than the CPU."""
        if not tight - {device.name for device in self._model.compute_devices if device.kind == "cpu"}:
            return
        if asked.offload_kqv:
            yield {"offload_kqv": False}, "keys and values in host memory; attention runs there"
        n_off = self._n_layer + 1 if self._wish.n_gpu_layers == -1 else min(self._wish.n_gpu_layers, self._n_layer + 1)
        n = _last(lambda n: self._changed(asked, {"n_gpu_layers": n}).fits, n_off - 1)
        yield {"n_gpu_layers": n}, "the other layers stay on the CPU"

    def _changed(self, asked: ContextParams, change: Mapping[str, object]) -> _Needs:
        """Measure what is asked for, but for some changes."""
        rest: dict[str, Any] = dict(change)
        wish = replace(self._wish, n_gpu_layers=rest.pop("n_gpu_layers", self._wish.n_gpu_layers))
        repack = rest.pop("repack", self._repack)
        model = self._model if rest else self._imagine(wish, repack)
        return self._needs(replace(asked, **rest), model)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """Return the last number up to `most` for which something holds that ceases to hold once; 0 if for none."""
    if most <= 0 or holds(most):
        return max(0, most)
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
