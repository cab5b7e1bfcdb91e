"""Which devices make a model one that runs in a process of its own, and how that process knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pykv.errors import ParamError
from pykv.ggml import Device, cpu_device, devices, is_remote
from pykv.isolation import is_possible
from pykv.models import Placement
from pykv.runtime.isolated.messages import DeviceName
from pykv.runtime.placing import Overrides, device_named

Isolate = bool | Literal["auto"]
Asked = Sequence[str | Device] | str | Device | None

Placing = tuple[Asked, int, Sequence[float] | None, Overrides | None]
"""What `Model.load` is told about devices, in its order."""

NamedPlacing = tuple[list[str | DeviceName], int, Any, Any]
"""The same with devices by names that mean the same in another process."""

_BACKEND = "RPC"


def is_isolated(isolate: Isolate, asked: Asked, overrides: Overrides | None = None) -> bool:
    """Return whether a model on these devices gets a process of its own: if so asked, else if one is remote.

    Raises
    ------
    ParamError : `isolate` is neither a bool nor "auto".
    """
    if isinstance(isolate, bool):
        return isolate
    if not isinstance(isolate, str) or isolate != "auto":
        raise ParamError(f"isolate={isolate!r} must be True, False or 'auto'")
    return is_possible() and any(_is_remote(one) for one in (*_chosen(asked), *_overriding(overrides)))


def all_named(placing: Placing) -> NamedPlacing:
    """Return the same with devices by names that mean the same in another process.

    Raises
    ------
    ParamError : there is no such device.
    """
    asked, n_gpu_layers, tensor_split, overrides = placing
    names = [_name(one, "devices") for one in _chosen(asked)]
    if not isinstance(overrides, Mapping):
        return names, n_gpu_layers, tensor_split, overrides
    return names, n_gpu_layers, tensor_split, {what: _name(one, "overrides") for what, one in overrides.items()}


def here(placement: Placement) -> Placement:
    """Return a placement of another process with this one's devices, as far as it has them too."""
    known = {one: one for one in devices()}

    def home(one: Device) -> Device:
        return known.get(one, one)

    rules = tuple(replace(rule, device=home(rule.device)) for rule in placement.rules)
    return Placement(home(placement.input), tuple(home(one) for one in placement.layers), home(placement.output), rules)


def titles(names: Sequence[str | DeviceName]) -> tuple[str, ...]:
    """Return names of devices for messages."""
    return tuple(one if isinstance(one, str) else f"device {one.index} of {one.endpoint}" for one in names)


def _chosen(asked: Asked) -> list[str | Device]:
    if asked is None:
        return [one for one in devices() if one.is_gpu] or [cpu_device()]
    if isinstance(asked, (str, Device)) or not isinstance(asked, Iterable):
        return [asked]  # what is no device is refused where it is named
    return list(asked)


def _is_remote(one: object) -> bool:
    if is_remote(one):
        return True
    if isinstance(one, str):
        known = {device.name.lower(): device for device in devices()}
        one = known.get(one.lower())
    return isinstance(one, Device) and one.backend == _BACKEND


def _overriding(overrides: Overrides | None) -> list[str | Device]:
    return list(overrides.values()) if isinstance(overrides, Mapping) else []


def _name(one: str | Device, argument: str) -> str | DeviceName:
    if isinstance(one, str) and is_remote(one):
        return one
    one = device_named(one, argument)
    if one.backend != _BACKEND:
        return one.name
    same = [each for each in devices() if each.backend == _BACKEND and each.description == one.description]
    return DeviceName(one.description, same.index(one))
