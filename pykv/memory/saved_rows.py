"""Rows of stored tensors, copied out of them byte for byte: into host memory, or into buffers beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pykv.ggml import Arena, BufferType, Tensor
from pykv.ggml.tensor_rows import move_rows, read_rows, write_rows
from pykv.memory.memory_buffers import TensorPlan, allocate
from pykv.memory.v_layout import cell_bytes, set_cell_bytes
from pykv.typing import AnyArray, I64Array


@dataclass(frozen=True, eq=False)
class RowsOf:
    """Some rows of one stored tensor.

    Attributes
    ----------
    rows : (k,) which, counted through all streams.
    buffer_type : where the tensor lies.
    by_channel : V stored transposed, whose rows are columns, here of one stream.
    """

    tensor: Tensor
    rows: I64Array
    buffer_type: BufferType
    by_channel: bool = False

    def read(self) -> AnyArray:
        """Return a copy, (k, bytes of a row) uint8, the same in both layouts."""
        return (cell_bytes if self.by_channel else read_rows)(self.tensor, self.rows)

    def write(self, data: AnyArray) -> None:
        """Write what `read` returns. Mutates the tensor's data."""
        (set_cell_bytes if self.by_channel else write_rows)(self.tensor, self.rows, data)


class SavedRows(Protocol):
    """Copies of rows of some tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, 0 once closed."""
        ...

    def write_to(self, targets: Sequence[RowsOf]) -> None:
        """Write them into as many rows of as many tensors of the same types. Mutates those."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


def saved(sources: Sequence[RowsOf], on: str) -> SavedRows:
    """Copy rows to the "host", or on their "device".

    Raises
    ------
    AllocError : a device lacks the memory; nothing stays allocated.
    """
    return HostRows(sources) if on == "host" else DeviceRows(sources)


class HostRows:
    """Rows as numpy bytes."""

    def __init__(self, sources: Sequence[RowsOf]) -> None:
        self._data = [source.read() for source in sources]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(one.nbytes for one in self._data)

    def write_to(self, targets: Sequence[RowsOf]) -> None:
        """See `SavedRows.write_to`."""
        for target, data in zip(targets, self._data, strict=True):
            target.write(data)

    def close(self) -> None:
        """Free the memory."""
        self._data.clear()


class DeviceRows:
    """Rows as tensors `[n, k]` in buffers of their own, of the types that they come from."""

    def __init__(self, sources: Sequence[RowsOf]) -> None:
        plan = _RowsPlan(tuple(_Place(i, one) for i, one in enumerate(sources) if one.rows.size))
        self._buffers, pairs = allocate(plan)
        self._kept = {i: tensor for i, (tensor, _) in pairs.items() if tensor is not None}
        self._nbytes = sum(tensor.nbytes for tensor in self._kept.values())
        for i, tensor in self._kept.items():
            self._fill(tensor, sources[i])

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, without alignment."""
        return self._nbytes

    def write_to(self, targets: Sequence[RowsOf]) -> None:
        """See `SavedRows.write_to`."""
        for i, tensor in self._kept.items():
            target = targets[i]
            if target.by_channel:
                target.write(read_rows(tensor, np.arange(tensor.ne[1])))
            else:
                move_rows(tensor, np.arange(tensor.ne[1]), target.tensor, target.rows)

    def close(self) -> None:
        """Free the buffers."""
        self._kept, self._nbytes = {}, 0
        for buffer in self._buffers:
            buffer.close()

    @staticmethod
    def _fill(tensor: Tensor, source: RowsOf) -> None:
        if source.by_channel:
            write_rows(tensor, np.arange(tensor.ne[1]), source.read())
        else:
            move_rows(source.tensor, source.rows, tensor, np.arange(tensor.ne[1]))


@dataclass(frozen=True, eq=False)
class _Place:
    """One tensor to be made: `il` counts them."""

    il: int
    source: RowsOf

    @property
    def buffer_type(self) -> BufferType:
        return self.source.buffer_type


@dataclass(frozen=True)
class _RowsPlan(TensorPlan[_Place]):
    places: tuple[_Place, ...]

    @property
    def layers(self) -> tuple[_Place, ...]:
        return self.places

    @property
    def purpose(self) -> str:
        return f"a snapshot of rows of {len(self.places)} tensors"

    def make_tensors(self, layers: tuple[_Place, ...]) -> tuple[Arena, list[tuple[Tensor, None]]]:
        arena = Arena(len(layers))
        shapes = [(one.source.tensor.dtype, one.source.tensor.ne[0], one.source.rows.size) for one in layers]
        return arena, [(arena.tensor(dtype, (n, k), "snapshot"), None) for dtype, n, k in shapes]
