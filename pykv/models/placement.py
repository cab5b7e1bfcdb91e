"""Placement: which device holds which part of a model, down to single tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pykv.ggml import Device


@dataclass(frozen=True)
class TensorRule:
    """Tensors whose name holds a match of `pattern`, a regular expression, lie on `device`."""

    pattern: str
    device: Device

    def fits(self, name: str) -> bool:
        """Return whether the rule is about the tensor of that name."""
        return re.search(self.pattern, name) is not None


@dataclass(frozen=True)
class Placement:
    """Which device holds which part of the model.

    Attributes
    ----------
    input, output : devices of what comes before the layers and after them.
    layers : device of each layer: of its tensors, and of its K and V or its states.
    rules : tensors that lie elsewhere than the rest of their part; the first rule that fits decides.
    """

    input: Device
    layers: tuple[Device, ...]
    output: Device
    rules: tuple[TensorRule, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in use, each once."""
        return tuple(dict.fromkeys((*self.layers, self.output, self.input, *(rule.device for rule in self.rules))))

    def home(self, name: str, device: Device) -> Device:
        """Return where the tensor of that name lies, given where the part does to which it belongs."""
        return next((rule.device for rule in self.rules if rule.fits(name)), device)
