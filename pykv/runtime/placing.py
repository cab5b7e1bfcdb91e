"""PlacementWish: what a caller says about devices, and the placement that it comes to for a model.

Source: spec params.md section 7.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import isfinite
from numbers import Real

from pykv.errors import ParamError
from pykv.ggml import Device, cpu_device, devices, find_device, is_remote, remote_devices
from pykv.models import Placement, TensorRule
from pykv.typing import as_int

Overrides = Mapping[int | range | str, str | Device]
"""A layer, a range of layers, or a regular expression over names of tensors → a device."""


@dataclass(frozen=True)
class PlacementWish:
    """Where a caller wants a model; made by `of`, which checks all that can be checked without the model.

    Attributes
    ----------
    devices : the devices that share the layers.
    n_gpu_layers : layers that go there, from the last one down, the output counting as one; -1 = all.
    shares : how much of them each device takes.
    layers : layers that go elsewhere; the first that names a layer decides.
    rules : tensors that go elsewhere than their layer.
    """

    devices: tuple[Device, ...]
    n_gpu_layers: int
    shares: tuple[Fraction, ...]
    layers: tuple[tuple[range, Device], ...] = ()
    rules: tuple[TensorRule, ...] = ()

    @classmethod
    def of(
        cls,
        devices: Sequence[str | Device] | str | Device | None = None,
        n_gpu_layers: int = -1,
        tensor_split: Sequence[float] | None = None,
        overrides: Overrides | None = None,
    ) -> PlacementWish:
        """Check what a caller asks for, see `Model.load`.

        Raises
        ------
        ParamError : no such device, or an argument that is none; the message names it.
        """
        chosen = _chosen(devices)
        n = as_int(n_gpu_layers)
        if n is None or n < -1:
            raise ParamError(f"n_gpu_layers={n_gpu_layers!r} must be -1 (all) or a number of layers")
        # differs from llama.cpp: even without shares, not by free memory, because where a layer lies should not depend
        # on what else runs at the time
        shares = (Fraction(1),) * len(chosen) if tensor_split is None else _shares(tensor_split, len(chosen))
        layers, rules = _overrides({} if overrides is None else overrides)
        return cls(chosen, n, shares, layers, rules)

    def over(self, names: Iterable[str], n_layer: int) -> Placement:
        """Return the placement of a model of `n_layer` layers, whose tensors have these names.

        Raises
        ------
        ParamError : an override that is about none of them.
        """
        names = tuple(names)
        for rule in self.rules:
            if not any(map(rule.fits, names)):
                raise ParamError(f"overrides: no tensor's name matches {rule.pattern!r}; {_like(names)}")
        homes = list(self._spread(n_layer))
        for layers, device in reversed(self.layers):
            if layers[-1] >= n_layer:
                raise ParamError(f"overrides: {_shown(layers)} must lie in 0..{n_layer - 1}, the model's layers")
            for il in layers:
                homes[il] = device
        return Placement(cpu_device(), tuple(homes[:n_layer]), homes[n_layer], self.rules)

    def _spread(self, n_layer: int) -> Iterator[Device]:
        """Yield a device for each layer and for the output: the last of them are shared out, the CPU has the rest."""
        n_off = n_layer + 1 if self.n_gpu_layers == -1 else min(self.n_gpu_layers, n_layer + 1)
        first = n_layer + 1 - n_off
        ends = [end / sum(self.shares) for end in accumulate(self.shares)]  # exact, so that halves are halves
        for i in range(n_layer + 1):
            if i < first:
                yield cpu_device()
            else:
                yield self.devices[bisect_right(ends, Fraction(i - first, n_off))]


def _chosen(asked: object) -> tuple[Device, ...]:
    """Return the devices that share the layers."""
    if asked is None:
        return tuple(device for device in devices() if device.is_gpu) or (cpu_device(),)
    named = (asked,) if isinstance(asked, (str, Device)) else asked
    if not isinstance(named, Iterable):
        raise ParamError(f"devices={asked!r} must be the name of a device, or several in a list")
    chosen = tuple(device for name in named for device in _devices_named(name))
    if not chosen:
        raise ParamError("devices=[] must name at least one device")
    return chosen


def _devices_named(name: object) -> tuple[Device, ...]:
    """Return what an element of `devices` stands for: one device, or all of a server."""
    if isinstance(name, str) and is_remote(name):
        return remote_devices(name)
    return (device_named(name, "devices"),)


def device_named(named: object, argument: str) -> Device:
    """Return a device, given by its name or as it is.

    Raises
    ------
    ParamError : there is none; the message names the argument.
    """
    if isinstance(named, Device):
        return named
    if not isinstance(named, str):
        raise ParamError(f"{argument}: {named!r} must be the name of a device, such as 'CUDA0'")
    if not is_remote(named):
        return find_device(named, argument)
    found = remote_devices(named)
    if len(found) > 1:
        raise ParamError(f"{argument}: {named!r} has {len(found)} devices; name one of them: {named}/0")
    return found[0]


def _shares(asked: object, n_devices: int) -> tuple[Fraction, ...]:
    values = tuple(asked) if isinstance(asked, Iterable) and not isinstance(asked, (str, bytes)) else None
    if values is None or not all(map(_is_share, values)):
        raise ParamError(f"tensor_split={asked!r} must be numbers that are not negative, one for each device")
    shares = tuple(Fraction(float(one)) for one in values)
    if len(shares) != n_devices or not any(shares):
        given = [float(one) for one in values]
        raise ParamError(f"tensor_split={given} must have a number for each of {n_devices} devices, not all 0")
    return shares


def _is_share(one: object) -> bool:
    return not isinstance(one, bool) and isinstance(one, Real) and isfinite(one) and float(one) >= 0


def _overrides(asked: object) -> tuple[tuple[tuple[range, Device], ...], tuple[TensorRule, ...]]:
    if not isinstance(asked, Mapping):
        raise ParamError(f"overrides={asked!r} must map layers or patterns to devices")
    layers, rules = list[tuple[range, Device]](), list[TensorRule]()
    for what, named in asked.items():
        device = device_named(named, "overrides")
        if isinstance(what, str):
            rules.append(TensorRule(_pattern(what), device))
        else:
            layers.append((_layers(what), device))
    return tuple(layers), tuple(rules)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ParamError(f"overrides: {text!r} is no regular expression: {error}") from None
    return text


def _layers(what: object) -> range:
    """Return the layers that a key of `overrides` names, ascending."""
    il = as_int(what)
    layers = what if isinstance(what, range) else None if il is None else range(il, il + 1)
    if layers is None:
        raise ParamError(f"overrides: {what!r} must be a layer, a range of layers, or a pattern of names of tensors")
    ascending = layers if layers.step > 0 else layers[::-1]
    if not ascending or ascending[0] < 0:
        raise ParamError(f"overrides: {what!r} must name layers, from 0 on")
    return ascending


def _shown(layers: range) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _like(names: Sequence[str]) -> str:
    """Return a few names of tensors, to show what they are like."""
    return f"they are like {', '.join(map(repr, names[:3]))}"
