"""Give a plan of tensors its memory: one buffer per buffer type, after a look whether there is room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from pykv.errors import AllocError
from pykv.ggml import Arena, Buffer, BufferType, Tensor, devices

Pair = tuple[Tensor | None, Tensor | None]


class HasLayer(Protocol):
    """A layer of a plan."""

    @property
    def il(self) -> int:
        """Which one."""
        ...


class HasPlace(HasLayer, Protocol):
    """A layer of a plan that has been placed."""

    @property
    def buffer_type(self) -> BufferType:
        """Where it goes."""
        ...


L = TypeVar("L", bound=HasLayer)
P = TypeVar("P", bound=HasPlace)


class BufferPlan(Protocol[L]):
    """Up to two tensors a layer, and the buffer type of each layer."""

    @property
    def by_buffer_type(self) -> tuple[tuple[BufferType, tuple[L, ...]], ...]:
        """Layers grouped by where they go."""
        ...

    @property
    def nbytes_per_buffer_type(self) -> Mapping[str, int]:
        """Bytes that allocation takes in each buffer type, alignment included."""
        ...

    @property
    def purpose(self) -> str:
        """What the memory is for, in messages: sizes first."""
        ...

    def make_tensors(self, layers: tuple[L, ...]) -> tuple[Arena, Sequence[Pair]]:
        """Return an arena with the headers of some layers, and these in pairs; None for a tensor that is not there."""
        ...


def by_buffer_type(layers: Sequence[P]) -> tuple[tuple[BufferType, tuple[P, ...]], ...]:
    """Return layers grouped by where they go, ordered by the buffer type's name."""
    kinds = sorted({layer.buffer_type for layer in layers}, key=lambda kind: kind.name)
    return tuple((kind, tuple(layer for layer in layers if layer.buffer_type == kind)) for kind in kinds)


def allocate(plan: BufferPlan[L]) -> tuple[list[Buffer], dict[int, Pair]]:
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


def _check_room(plan: BufferPlan[L]) -> None:
    """Refuse what the devices lack before anything is touched."""
    # differs from llama.cpp: asked first, because a host that overcommits would grant it and end the process later
    needs, free = plan.nbytes_per_buffer_type, dict[str, int]()
    for device in devices():
        name = device.buffer_type.name
        # helpers of the CPU share its buffer type and report nothing; a server without a part in this is not asked
        if name in needs and device.memory_total:
            free[name] = max(free.get(name, 0), device.memory_free)
    for name, need in needs.items():
        if need > free.get(name, need):
            raise AllocError(f"{plan.purpose} needs {need} bytes in {name}, which has {free[name]} bytes free")
