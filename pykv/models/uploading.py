"""Uploading: tensors on their way from a mapped file to a device, a piece at a time and without a second copy."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np

from pykv.errors import AllocError
from pykv.ggml import Arena, Buffer, Device, DType, Tensor, takes_pieces
from pykv.gguf import TensorInfo
from pykv.models import widening
from pykv.typing import AnyArray

PIECE = 2**24
"""Bytes that are sent at once, and so much of the file as is held in memory meanwhile."""


def upload(
    buffer: Buffer, taken: Sequence[tuple[Tensor, TensorInfo]], mapped: mmap.mmap, device: Device
) -> Iterator[int]:
    """Fill tensors of a buffer of the device from the file; yields the bytes of each piece when it is done."""
    source = np.frombuffer(mapped, np.uint8)
    staging = _staging(device, max(info.nbytes for _, info in taken))
    for tensor, info in taken:
        data = source[info.offset : info.offset + info.nbytes]
        is_widened = tensor.dtype != info.dtype
        is_whole = is_widened or tensor.arena.is_repacked or not takes_pieces(device)
        buffer.adopt(tensor)
        for begin in range(0, info.nbytes, info.nbytes if is_whole else PIECE):
            piece = data[begin : begin + (info.nbytes if is_whole else PIECE)]
            tensor.set(_widened(piece, tensor) if is_widened else _staged(piece, staging), begin)
            _forget(mapped, info.offset + begin, info.offset + begin + piece.size)
            yield piece.size


def _widened(data: AnyArray, tensor: Tensor) -> AnyArray:
    wide = np.empty(tensor.nbytes, np.uint8)
    widening.widen(data, wide)
    return wide


def _staged(piece: AnyArray, staging: AnyArray | None) -> AnyArray:
    """Return a piece where the device copies it from fastest."""
    if staging is None or piece.size > staging.size:
        return piece
    staging[: piece.size] = piece
    return staging[: piece.size]


def _staging(device: Device, n_most: int) -> AnyArray | None:
    """Return memory of the host from which the device copies fast, for a piece; None where there is none to be had."""
    kind = device.host_buffer_type
    if kind is None:
        return None
    arena = Arena(1)
    tensor = arena.tensor(DType.I8, (min(n_most, PIECE),), "staging")
    try:
        buffer = Buffer.allocate(arena, kind, "staging of weights")
    except AllocError:  # such memory is scarce, and its use is speed alone
        return None
    return buffer.host_view(buffer.adopt(tensor)).reshape(-1).view(np.uint8)  # the array keeps the memory


def _forget(mapped: mmap.mmap, begin: int, end: int) -> None:
    """Let go of the pages of bytes that have been copied: they would count twice otherwise."""
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    n_bytes = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if n_bytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, n_bytes)
