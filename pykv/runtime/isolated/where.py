"""Which devices make a model one that runs in a process of its own, and how that process knows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pykv.errors import ParamError
from pykv.ggml import Device, cpu_device, devices, find_device
from pykv.isolation import is_possible
from pykv.runtime.isolated.messages import DeviceName

Isolate = bool | Literal["auto"]
Asked = Sequence[str | Device] | str | Device | None

REMOTE = "rpc://"
_BACKEND = "RPC"


def is_isolated(isolate: Isolate, asked: Asked) -> bool:
    """Return whether a model on these devices gets a process of its own: if so asked, else if one is remote.

    Raises
    ------
    ParamError : `isolate` is neither a bool nor "auto".
    """
    if isinstance(isolate, bool):
        return isolate
    if not isinstance(isolate, str) or isolate != "auto":
        raise ParamError(f"isolate={isolate!r} must be True, False or 'auto'")
    return is_possible() and any(_is_remote(one) for one in _chosen(asked))


def named(asked: Asked) -> list[str | DeviceName]:
    """Return the devices by names that mean the same in another process.

    Raises
    ------
    ParamError : there is no such device.
    """
    return [_name(one) for one in _chosen(asked)]


def titles(names: Sequence[str | DeviceName]) -> tuple[str, ...]:
    """Return names of devices for messages."""
    return tuple(one if isinstance(one, str) else f"device {one.index} of {one.endpoint}" for one in names)


def _chosen(asked: Asked) -> list[str | Device]:
    if asked is None:
        return [one for one in devices() if one.is_gpu] or [cpu_device()]
    if isinstance(asked, (str, Device)):
        return [asked]
    return list(asked) if isinstance(asked, Iterable) else []


def _is_remote(one: object) -> bool:
    if isinstance(one, str):
        known = {device.name.lower(): device for device in devices()}
        if one.lower().startswith(REMOTE):
            return True
        one = known.get(one.lower())
    return isinstance(one, Device) and one.backend == _BACKEND


def _name(one: str | Device) -> str | DeviceName:
    if isinstance(one, str):
        if one.lower().startswith(REMOTE):
            return one
        one = find_device(one)
    if one.backend != _BACKEND:
        return one.name
    same = [each for each in devices() if each.backend == _BACKEND and each.description == one.description]
    return DeviceName(one.description, same.index(one))
