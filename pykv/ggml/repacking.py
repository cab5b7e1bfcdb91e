"""Which matrices a device can lay out anew for its products: what ggml says of a product with one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from pykv._native import ffi, lib
from pykv.ggml.arena import Arena
from pykv.ggml.device import Device
from pykv.ggml.ops import mul_mat, mul_mat_id
from pykv.ggml.ops.check import READABLE
from pykv.ggml.types import DType

_N_COLUMNS = 8


def can_repack(device: Device, dtype: DType, ne: Sequence[int]) -> bool:
    """Whether `device` has faster products with a matrix [k, m], or experts [k, m, n_expert], that is repacked.

    Asks ggml, which knows the kernels of this machine. Allocates nothing.
    """
    if device.repack_type is None or dtype not in READABLE or not 2 <= len(ne) <= 3 or ne[0] % dtype.block_size:
        return False
    return _can_repack(device, dtype, tuple(ne))


@cache
def _can_repack(device: Device, dtype: DType, ne: tuple[int, ...]) -> bool:
    kind = device.repack_type
    assert kind is not None
    arena, nodes = Arena(1, is_repacked=True), Arena(4, 4)
    matrix = arena.tensor(dtype, ne)
    if len(ne) == 2:
        product = mul_mat(nodes, matrix, nodes.tensor(DType.F32, (ne[0], _N_COLUMNS)))
    else:
        columns, index = nodes.tensor(DType.F32, (ne[0], 1, _N_COLUMNS)), nodes.tensor(DType.I32, (1, _N_COLUMNS))
        product = mul_mat_id(nodes, matrix, columns, index)
    place = lib.ggml_backend_buft_alloc_buffer(kind.ptr, 0)
    matrix.raw.buffer = place
    try:
        return device.supports_op(product.ptr)
    finally:
        matrix.raw.buffer = ffi.NULL
        lib.ggml_backend_buffer_free(place)
