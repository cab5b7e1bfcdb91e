"""Guards of repacked matrices: the raw call ends the process or reads nonsense, pykv's raises."""

from __future__ import annotations

import numpy as np
import pytest
from support.guard import Guard, check_guard
from support.mortal import Mortal

from pykv.ggml import Arena, Buffer, DType, Tensor, can_repack, cpu_device

pytestmark = pytest.mark.abort

CPU = cpu_device()

RAW = """
c = context()
x = tensor(c, {dtype}, 64, 64)
kind = lib.pykv_repack_type(lib.ggml_backend_get_device(cpu()))
buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(c, kind)
room = ffi.new("char[]", 65536)
"""
PLACED = RAW.format(dtype="lib.GGML_TYPE_Q4_0")
UNFIT = RAW.format(dtype="F32")


def _matrix(dtype: DType = DType.Q4_0) -> Tensor:
    arena, kind = Arena(1, is_repacked=True), CPU.repack_type
    assert kind is not None
    tensor = arena.tensor(dtype, (64, 64))
    return Buffer.allocate(arena, kind, "a test").adopt(tensor)


def _set(tensor: Tensor, n_bytes: int, offset: int = 0) -> None:
    tensor.set(np.zeros(n_bytes, np.uint8), offset)


GUARDS: dict[str, Guard] = {
    "read": (
        PLACED + "lib.ggml_backend_tensor_get(x, room, 0, 64)",
        lambda a, t: _matrix().raw_bytes(),
    ),
    "a part written": (
        PLACED + "lib.ggml_backend_tensor_set(x, room, 0, 64)",
        lambda a, t: _set(_matrix(), 64),
    ),
    "an end written": (
        PLACED + "lib.ggml_backend_tensor_set(x, room, 18, 18)",
        lambda a, t: _set(_matrix(), 18, 18),
    ),
    "a type that is not repacked": (
        UNFIT + "lib.ggml_backend_tensor_set(x, room, 0, 16384)",
        lambda a, t: _set(_matrix(DType.F32), 16384),
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_what_ends_the_process_raises(name: str) -> None:
    if not can_repack(CPU, DType.Q4_0, (64, 64)):
        return  # there is nothing to guard
    with Mortal() as mortal:
        check_guard(mortal, GUARDS[name])
