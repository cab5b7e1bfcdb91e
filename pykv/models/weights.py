"""Weights: take tensors out of a GGUF file by name and shape, then place them on their devices.

On a device that can read host memory the file is mapped and used in place; elsewhere it is uploaded. Matrices of which
the device has faster products in another layout or type are laid out anew, if that is wished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pykv.errors import GGUFError
from pykv.ggml import Arena, Buffer, BufferType, Device, DType, Tensor, can_repack
from pykv.ggml.buffer import PLACE_ALIGNMENT
from pykv.ggml.owner import Owner
from pykv.gguf import GGUFFile, TensorInfo
from pykv.models import widening
from pykv.models.placement import Placement
from pykv.models.uploading import upload

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_UNUSABLE = {DType.F64, DType.I8, DType.I16, DType.I32, DType.I64, DType.Q8_1, DType.Q8_K}


class Use(Enum):
    """What a family's graph does with a tensor. Only products are made with tensors that are repacked."""

    PRODUCT = "a matrix is multiplied with, all else is left as it is"
    EXPERTS = "a stack of matrices, each column is multiplied with those that an index names"
    LOOKUP = "rows are looked up, or it is read in another way"


_REPACKED_DIMS = {Use.PRODUCT: 2, Use.EXPERTS: 3, Use.LOOKUP: 0}


@dataclass(frozen=True)
class _Home:
    """Where tensors lie, and how."""

    device: Device
    is_repacked: bool
    is_widened: bool

    @property
    def buffer_type(self) -> BufferType:
        repacked = self.device.repack_type if self.is_repacked else None
        return repacked or self.device.buffer_type

    @property
    def is_mapped(self) -> bool:
        return self.device.can_wrap_host_memory and not self.is_repacked and not self.is_widened


@dataclass(frozen=True)
class ImaginedWeights:
    """Tensors in one place, before they are loaded.

    Attributes
    ----------
    nbytes : bytes that loading allocates.
    mapped_nbytes : bytes of tensors that are used where the file is mapped, which takes no memory of its own.
    """

    device: Device
    buffer: Buffer
    nbytes: int
    mapped_nbytes: int


class Weights:
    """Collects the tensors that an architecture asks for; `load` then gives them their data.

    With `repack`, matrices are repacked if everything is on the CPU and the file fits into its free memory once more.

    Raises
    ------
    GGUFError : the file's tensors lie where they cannot be read in place.
    """

    def __init__(self, file: GGUFFile, placement: Placement, *, repack: bool = False) -> None:
        if file.alignment % PLACE_ALIGNMENT:
            raise GGUFError(
                f"{file.path}: general.alignment={file.alignment} must be a multiple of {PLACE_ALIGNMENT}: "
                "weights are used where they lie in the file"
            )
        self._file, self.placement = file, placement
        # an architecture takes each tensor once, and tied embeddings twice
        self._budget = len(file.tensors) + 1
        self._repacks = repack and _has_room(file, placement)
        self._arenas: dict[_Home, Arena] = {}
        self._taken: dict[_Home, list[tuple[Tensor, TensorInfo]]] = {}

    def need(self, name: str, ne: tuple[int, ...], device: Device, use: Use = Use.PRODUCT) -> Tensor:
        """Return the tensor of that name, without data yet; `use` is all that the graph may do with it.

        `device` is where its part of the model lies; the placement may have another place for it.

        Raises
        ------
        GGUFError : it is missing, or its shape or type is wrong; the message names it and what was expected.
        """
        tensor = self.maybe(name, ne, device, use)
        if tensor is None:
            raise GGUFError(f"{self._file.path}: the tensor {name!r} {list(ne)} is missing")
        return tensor

    def maybe(self, name: str, ne: tuple[int, ...], device: Device, use: Use = Use.PRODUCT) -> Tensor | None:
        """Return the tensor of that name, or None if the file has none; checks it like `need`."""
        info = self._file.tensors.get(name)
        if info is None:
            return None
        if info.ne != (*ne, 1, 1, 1)[:4]:
            raise GGUFError(f"{self._file.path}: the tensor {name!r} is {list(info.ne)}, expected {list(ne)}")
        if info.dtype in _UNUSABLE or (len(ne) == 1 and info.dtype != DType.F32):
            wanted = "f32" if len(ne) == 1 else "a float or a quantised type"
            raise GGUFError(f"{self._file.path}: the tensor {name!r} is {info.dtype.label}, expected {wanted}")
        dtype, home = self._kept_as(info.dtype, ne, self.placement.home(name, device), use)
        if home not in self._arenas:
            self._arenas[home], self._taken[home] = Arena(self._budget, is_repacked=home.is_repacked), []
        tensor = self._arenas[home].tensor(dtype, info.ne, name)
        self._taken[home].append((tensor, info))
        return tensor

    def _kept_as(self, dtype: DType, ne: tuple[int, ...], device: Device, use: Use) -> tuple[DType, _Home]:
        """Return the type and the place of a tensor: another than in the file where products are faster so."""
        if not self._repacks or len(ne) != _REPACKED_DIMS[use]:
            return dtype, _Home(device, False, False)
        is_widened = dtype == widening.NARROW and widening.pays(device)
        dtype = widening.WIDE if is_widened else dtype
        return dtype, _Home(device, can_repack(device, dtype, ne), is_widened)

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
        total, done = sum(info.nbytes for taken in self._taken.values() for _, info in taken), 0
        buffers: list[Owner] = []
        for home, taken in self._taken.items():
            arena, device = self._arenas[home], home.device
            if home.is_mapped:
                buffer = Buffer.wrap(arena, device, mapped, max(info.nbytes for _, info in taken))
                for tensor, info in taken:
                    buffer.place(tensor, info.offset)
            else:
                buffer = self._allocate(arena, home)
                for n_bytes in upload(buffer, taken, mapped, device):
                    done += n_bytes
                    if progress is not None:
                        progress(done, total)
            buffer.mark_weights()
            buffers.append(buffer)
        if progress is not None:
            progress(total, total)
        return tuple(buffers)

    def imagine(self) -> tuple[ImaginedWeights, ...]:
        """Let all tensors that were taken lie where `load` would put them, but without memory and data."""
        imagined = []
        for home, taken in self._taken.items():
            buffer = Buffer.allocate(self._arenas[home], home.buffer_type.imagined(), self._file.path.name)
            buffer.mark_weights()
            used = {info.offset: info.nbytes for _, info in taken}  # tied embeddings are taken twice
            mapped = sum(used.values()) if home.is_mapped else 0
            imagined.append(ImaginedWeights(home.device, buffer, 0 if home.is_mapped else buffer.nbytes, mapped))
        return tuple(imagined)

    def _allocate(self, arena: Arena, home: _Home) -> Buffer:
        name = self._file.path.name
        purpose = (
            f"repacked weights of {name} (repack=False does without)" if home.is_repacked else f"weights of {name}"
        )
        return Buffer.allocate(arena, home.buffer_type, purpose)


def _has_room(file: GGUFFile, placement: Placement) -> bool:
    """Whether all is on the CPU, and a copy of the file fits into its memory: what is mapped needs none."""
    # beside another device the CPU lends it its weights for long prompts, and these must lie as they are in the file
    n_bytes = file.nbytes * widening.GROWTH
    return all(device.kind == "cpu" and n_bytes <= device.memory_free for device in placement.devices)


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one layer, named without their prefix."""

    weights: Weights
    prefix: str
    device: Device

    def need(self, name: str, *ne: int, use: Use = Use.PRODUCT) -> Tensor:
        """See `Weights.need`."""
        return self.weights.need(self.prefix + name, ne, self.device, use)

    def maybe(self, name: str, *ne: int, use: Use = Use.PRODUCT) -> Tensor | None:
        """See `Weights.maybe`."""
        return self.weights.maybe(self.prefix + name, ne, self.device, use)

    def need_f32(self, name: str, *ne: int) -> Tensor:
        """See `Weights.need_f32`."""
        return self.weights.need_f32(self.prefix + name, ne, self.device)

    def maybe_f32(self, name: str, *ne: int) -> Tensor | None:
        """See `Weights.maybe_f32`."""
        return self.weights.maybe_f32(self.prefix + name, ne, self.device)

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor of that name."""
        return self.weights.has(self.prefix + name)
