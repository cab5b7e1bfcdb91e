"""Weights: take tensors out of a GGUF file by name and shape, then place them on their devices.

On a device that can read host memory the file is mapped and used in place; elsewhere it is uploaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pykv.errors import GGUFError
from pykv.ggml import Arena, Buffer, Device, DType, Tensor
from pykv.ggml.buffer import PLACE_ALIGNMENT
from pykv.ggml.owner import Owner
from pykv.gguf import GGUFFile, TensorInfo

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_UNUSABLE = {DType.F64, DType.I8, DType.I16, DType.I32, DType.I64, DType.Q8_1, DType.Q8_K}


@dataclass(frozen=True)
class Placement:
    """Which device holds which part of the model."""

    input: Device
    layers: tuple[Device, ...]
    output: Device

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in use, each once."""
        return tuple(dict.fromkeys((*self.layers, self.output, self.input)))


class Weights:
    """Collects the tensors that an architecture asks for; `load` then gives them their data.

    Raises
    ------
    GGUFError : the file's tensors lie where they cannot be read in place.
    """

    def __init__(self, file: GGUFFile, placement: Placement) -> None:
        if file.alignment % PLACE_ALIGNMENT:
            raise GGUFError(
                f"{file.path}: general.alignment={file.alignment} must be a multiple of {PLACE_ALIGNMENT}: "
                "weights are used where they lie in the file"
            )
        self._file, self.placement = file, placement
        # an architecture takes each tensor once, and tied embeddings twice
        self._budget = len(file.tensors) + 1
        self._arenas: dict[Device, Arena] = {}
        self._taken: dict[Device, list[tuple[Tensor, TensorInfo]]] = {}

    def need(self, name: str, ne: tuple[int, ...], device: Device) -> Tensor:
        """Return the tensor of that name, without data yet.

        Raises
        ------
        GGUFError : it is missing, or its shape or type is wrong; the message names it and what was expected.
        """
        tensor = self.maybe(name, ne, device)
        if tensor is None:
            raise GGUFError(f"{self._file.path}: the tensor {name!r} {list(ne)} is missing")
        return tensor

    def maybe(self, name: str, ne: tuple[int, ...], device: Device) -> Tensor | None:
        """Return the tensor of that name, or None if the file has none; checks it like `need`."""
        info = self._file.tensors.get(name)
        if info is None:
            return None
        if info.ne != (*ne, 1, 1, 1)[:4]:
            raise GGUFError(f"{self._file.path}: the tensor {name!r} is {list(info.ne)}, expected {list(ne)}")
        if info.dtype in _UNUSABLE or (len(ne) == 1 and info.dtype != DType.F32):
            wanted = "f32" if len(ne) == 1 else "a float or a quantised type"
            raise GGUFError(f"{self._file.path}: the tensor {name!r} is {info.dtype.label}, expected {wanted}")
        arena = self._arenas.setdefault(device, Arena(self._budget))
        tensor = arena.tensor(info.dtype, info.ne, name)
        self._taken.setdefault(device, []).append((tensor, info))
        return tensor

    def need_f32(self, name: str, ne: tuple[int, ...], device: Device) -> Tensor:
        """Return the tensor of that name, which its reader takes as f32 only; checks it like `need`."""
        self._check_f32(name)
        return self.need(name, ne, device)

    def maybe_f32(self, name: str, ne: tuple[int, ...], device: Device) -> Tensor | None:
        """Return the tensor of that name, or None if the file has none; checks it like `need_f32`."""
        self._check_f32(name)
        return self.maybe(name, ne, device)

    def _check_f32(self, name: str) -> None:
        info = self._file.tensors.get(name)
        if info is not None and info.dtype != DType.F32:
            raise GGUFError(f"{self._file.path}: the tensor {name!r} is {info.dtype.label}, expected f32")

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor of that name."""
        return name in self._file.tensors

    def layer(self, il: int) -> LayerWeights:
        """Return the source of one layer's tensors."""
        return LayerWeights(self, f"blk.{il}.", self.placement.layers[il])

    def load(self, progress: Progress | None = None) -> tuple[Owner, ...]:
        """Give all tensors that were taken their data.

        Returns
        -------
        The owners of the memory; whoever uses the tensors keeps them.

        Raises
        ------
        AllocError : a device has no room.
        """
        mapped = self._file.map()
        total = sum(info.nbytes for taken in self._taken.values() for _, info in taken)
        done = 0
        buffers: list[Owner] = []
        for device, taken in self._taken.items():
            if device.can_wrap_host_memory:
                buffer = Buffer.wrap(self._arenas[device], device, mapped, max(i.nbytes for _, i in taken))
                for tensor, info in taken:
                    buffer.place(tensor, info.offset)
            else:
                purpose = f"weights of {self._file.path.name}"
                buffer = Buffer.allocate(self._arenas[device], device.buffer_type, purpose)
                source = np.frombuffer(mapped, np.uint8)
                for tensor, info in taken:
                    buffer.adopt(tensor).set(source[info.offset : info.offset + info.nbytes])
                    done += info.nbytes
                    if progress is not None:
                        progress(done, total)
            buffer.mark_weights()
            buffers.append(buffer)
        if progress is not None:
            progress(total, total)
        return tuple(buffers)


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one layer, named without their prefix."""

    weights: Weights
    prefix: str
    device: Device

    def need(self, name: str, *ne: int) -> Tensor:
        """See `Weights.need`."""
        return self.weights.need(self.prefix + name, ne, self.device)

    def maybe(self, name: str, *ne: int) -> Tensor | None:
        """See `Weights.maybe`."""
        return self.weights.maybe(self.prefix + name, ne, self.device)

    def need_f32(self, name: str, *ne: int) -> Tensor:
        """See `Weights.need_f32`."""
        return self.weights.need_f32(self.prefix + name, ne, self.device)

    def maybe_f32(self, name: str, *ne: int) -> Tensor | None:
        """See `Weights.maybe_f32`."""
        return self.weights.maybe_f32(self.prefix + name, ne, self.device)

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor of that name."""
        return self.weights.has(self.prefix + name)
