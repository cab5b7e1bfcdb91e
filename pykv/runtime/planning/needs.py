"""Plan: what a model and a context take on each device, whether that fits, and what would take less. Only numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceNeeds:
    """What one device is asked for, in bytes.

    Attributes
    ----------
    name, description : the device.
    weights : what the weights allocate there.
    mapped : weights that are used where the file is mapped: the system pages them in and out, nothing is allocated.
    kv : keys and values; `kv_by_buffer_type` tells in which memory these and the states lie.
    states : states of recurrent layers.
    compute : scratch memory for the largest ubatch.
    output : host memory of a row of logits for each sequence; a batch that asks for more rows takes more.
    free : what can still be allocated there now; None where the device does not say.
    """

    name: str
    description: str
    weights: int
    mapped: int
    kv: int
    states: int
    kv_by_buffer_type: dict[str, int]
    compute: int
    output: int
    free: int | None

    @property
    def total(self) -> int:
        """All that is allocated."""
        return self.weights + self.kv + self.states + self.compute + self.output

    @property
    def fits(self) -> bool:
        """Whether it is not more than what is free."""
        return self.free is None or self.total <= self.free


@dataclass(frozen=True)
class Suggestion:
    """One change of a parameter, and what it saves.

    Attributes
    ----------
    change : parameters of `plan`, by name.
    saves : bytes that it saves on each device; negative where it takes more.
    fits : whether all would fit then.
    note : what it costs otherwise.
    """

    change: dict[str, object]
    saves: dict[str, int]
    fits: bool
    note: str


@dataclass(frozen=True)
class Plan:
    """What a model and a context take.

    Attributes
    ----------
    devices : the devices in use, the CPU last.
    n_ctx, n_ctx_seq : tokens of all sequences, and of one, as a context would round them.
    n_ctx_train : tokens that the model was trained for.
    attention : which way attention is computed, on which the scratch memory depends.
    largest_n_ctx : the largest `n_ctx` that fits, at most what the model was trained for in each sequence; 0 = none.
    suggestions : changes that save memory where it is short, the largest first; elsewhere those that save most.
    """

    devices: tuple[DeviceNeeds, ...]
    n_ctx: int
    n_ctx_seq: int
    n_ctx_train: int
    attention: str
    largest_n_ctx: int
    suggestions: tuple[Suggestion, ...]

    @property
    def fits(self) -> bool:
        """Whether every device has enough free memory now."""
        return all(device.fits for device in self.devices)

    @property
    def total(self) -> int:
        """Bytes of all devices together."""
        return sum(device.total for device in self.devices)
