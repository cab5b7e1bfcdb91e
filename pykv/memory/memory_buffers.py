"""TensorPlan: tensors of layers and the bytes they take; and its memory, given after a look whether there is room."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from pykv.errors import AllocError, ParamError
from pykv.ggml import Arena, Buffer, BufferType, Tensor, cpu_device, devices

Pair = tuple[Tensor | None, Tensor | None]


class PlacedLayer(Protocol):
    """A layer of a plan."""

    @property
    def il(self) -> int:
        """Which one."""
        ...

    @property
    def buffer_type(self) -> BufferType:
        """Where it goes."""
        ...


L = TypeVar("L", bound=PlacedLayer)


class TensorPlan(ABC, Generic[L]):
    """Up to two tensors a layer, where they go, and the bytes they take. Nothing is allocated."""

    @property
    @abstractmethod
    def layers(self) -> tuple[L, ...]:
        """The layers that own tensors, in order."""

    @property
    @abstractmethod
    def purpose(self) -> str:
        """What the memory is for, in messages: sizes first."""

    @abstractmethod
    def make_tensors(self, layers: tuple[L, ...]) -> tuple[Arena, Sequence[Pair]]:
        """Return an arena with the headers of some layers, and these in pairs; None for a tensor that is not there."""

    @cached_property
    def by_buffer_type(self) -> tuple[tuple[BufferType, tuple[L, ...]], ...]:
        """Layers grouped by where they go, ordered by the buffer type's name."""
        kinds = sorted({layer.buffer_type for layer in self.layers}, key=lambda kind: kind.name)
        return tuple((kind, tuple(layer for layer in self.layers if layer.buffer_type == kind)) for kind in kinds)

    @cached_property
    def nbytes_per_buffer_type(self) -> dict[str, int]:
        """Bytes that allocation takes in each buffer type, alignment included."""
        return {kind.name: kind.alloc_size(self.make_tensors(layers)[0]) for kind, layers in self.by_buffer_type}

    @property
    def nbytes(self) -> int:
        """Bytes that allocation takes in all."""
        return sum(self.nbytes_per_buffer_type.values())


def unplaced(il: int) -> BufferType:
    """Return where a layer goes that nobody places: to the CPU."""
    return cpu_device().buffer_type


def home_of(il: int, place: Callable[[int], BufferType] | None) -> BufferType:
    """Return where a layer goes.

    Raises
    ------
    ParamError : `place` gives something else than a buffer type.
    """
    kind = (place or unplaced)(il)
    if not isinstance(kind, BufferType):
        raise ParamError(f"place: {kind!r}, given for layer {il}, must be a BufferType")
    return kind


def allocate(plan: TensorPlan[L]) -> tuple[list[Buffer], dict[int, Pair]]:
    """Return zeroed buffers, and the tensors of each layer.

    Raises
    ------
    AllocError : a device lacks the memory; nothing stays allocated.
    """
    _check_room(plan)
    buffers: list[Buffer] = []
    tensors: dict[int, Pair] = {}
    try:
        for kind, layers in plan.by_buffer_type:
            arena, pairs = plan.make_tensors(layers)
            buffer = Buffer.allocate(arena, kind, plan.purpose)
            buffers.append(buffer)
            for layer, (a, b) in zip(layers, pairs, strict=True):
                tensors[layer.il] = (a and buffer.adopt(a), b and buffer.adopt(b))
    except BaseException:
        for buffer in buffers:
            buffer.close()
        raise
    return buffers, tensors


def _check_room(plan: TensorPlan[L]) -> None:
    """Refuse what the devices lack before anything is touched."""
    # differs from llama.cpp: asked first, because a host that overcommits would grant it and end the process later
    real = {kind.name for kind, _ in plan.by_buffer_type if not kind.is_imagined}
    needs = {name: n_bytes for name, n_bytes in plan.nbytes_per_buffer_type.items() if name in real}
    free = dict[str, int]()
    for device in devices():
        name = device.buffer_type.name
        # helpers of the CPU share its buffer type and report nothing; a server without a part in this is not asked
        if name in needs and device.memory_total:
            free[name] = max(free.get(name, 0), device.memory_free)
    for name, need in needs.items():
        if need > free.get(name, need):
            raise AllocError(f"{plan.purpose} needs {need} bytes in {name}, which has {free[name]} bytes free")
