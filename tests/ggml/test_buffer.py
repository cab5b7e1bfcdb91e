"""Buffers: allocation, placing, wrapping."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import AllocError, TensorError, UseAfterCloseError
from pykv.ggml import Arena, Buffer, BufferType, DType, cpu_device, ops

CPU = cpu_device()
HOST = CPU.buffer_type


def aligned(n_bytes: int) -> np.ndarray:
    """Return zeroed bytes at an address that every device takes."""
    room = np.zeros(n_bytes + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    return room[start : start + n_bytes]


def test_the_cpu_buffer_type():
    assert HOST.is_host
    assert HOST.alignment >= 16
    assert HOST.name == "CPU"
    assert BufferType(HOST.ptr) == HOST


def test_sizes_are_known_before_and_true_after():
    arena = Arena(3)
    for ne in ((5,), (100, 3), (32,)):
        arena.tensor(DType.F32, ne)
    expect = sum(-(-4 * n // HOST.alignment) * HOST.alignment for n in (5, 300, 32))
    assert HOST.alloc_size(arena) == expect
    with Buffer.allocate(arena, HOST, "test") as buffer:
        assert buffer.nbytes == expect
        assert buffer.is_host
        assert HOST.alloc_size(arena) == 0


def test_more_than_there_is_names_purpose_and_bytes():
    arena = Arena(1)
    arena.tensor(DType.F32, (2**55,))
    with pytest.raises(AllocError, match=rf"the moon: CPU has no room for {2**57} bytes") as caught:
        Buffer.allocate(arena, HOST, "the moon")
    assert isinstance(caught.value, MemoryError)


def test_an_arena_without_anything_to_place():
    arena = Arena(2)
    with pytest.raises(TensorError, match="no tensor that needs memory"):
        Buffer.allocate(arena, HOST, "test")
    arena.tensor(DType.F32, (1,))
    with Buffer.allocate(arena, HOST, "test"), pytest.raises(TensorError, match="no tensor that needs memory"):
        Buffer.allocate(arena, HOST, "again")


def test_later_tensors_go_into_a_second_buffer():
    arena = Arena(2)
    x = arena.tensor(DType.F32, (4,))
    first = Buffer.allocate(arena, HOST, "first")
    x.set(np.ones(4, np.float32))
    y = arena.tensor(DType.F32, (4,))
    second = Buffer.allocate(arena, HOST, "second")
    assert first.adopt(x).numpy().sum() == 4
    assert second.adopt(y).numpy().sum() == 0


def test_views_of_tensors_without_data_cannot_be_placed():
    base, views = Arena(1), Arena(2)
    ops.reshape(views, base.tensor(DType.F32, (4,)), 2, 2)
    views.tensor(DType.F32, (4,))
    with pytest.raises(TensorError, match="no data yet"):
        Buffer.allocate(views, HOST, "test")


def test_adopt_asks_for_data_in_this_arena():
    arena = Arena(3)
    x = arena.tensor(DType.F32, (4,))
    buffer = Buffer.allocate(arena, HOST, "test")
    late = arena.tensor(DType.F32, (4,))
    for wrong in (late, Arena(1).tensor(DType.F32, (4,))):
        with pytest.raises(TensorError, match="no data in this buffer"):
            buffer.adopt(wrong)
    assert buffer.adopt(x) is buffer.adopt(x)
    assert x.owner is buffer
    buffer.close()
    with pytest.raises(UseAfterCloseError):
        buffer.adopt(x)


def test_wrap_and_place():
    memory = aligned(256)
    memory[:] = np.arange(256, dtype=np.uint8)
    arena = Arena(2)
    x, y = arena.tensor(DType.I8, (16,)), arena.tensor(DType.I32, (4, 2))
    buffer = Buffer.wrap(arena, CPU, memory, 32)
    buffer.place(x, 4)
    buffer.place(y, 224)
    assert x.numpy()[0, 0, 0].tolist() == list(range(4, 20))
    assert y.raw_bytes().tolist() == list(range(224, 256))
    x.fill(9)
    assert memory[:24].tolist() == [0, 1, 2, 3, *[9] * 16, 20, 21, 22, 23]


@pytest.mark.parametrize("offset", [-4, 2, 244, 256, 2**63, -(2**63)])
def test_place_refuses_offsets(offset):
    arena = Arena(1)
    x = arena.tensor(DType.F32, (4,))
    buffer = Buffer.wrap(arena, CPU, aligned(256), 16)
    with pytest.raises(TensorError, match=f"16 bytes at {offset} leave a buffer of 256 bytes"):
        buffer.place(x, offset)
    buffer.place(x, 240)


def test_place_refuses_tensors():
    arena = Arena(4)
    x = arena.tensor(DType.F32, (4,))
    buffer = Buffer.wrap(arena, CPU, aligned(256), 16)
    view = ops.reshape(arena, x, 2, 2)
    with pytest.raises(TensorError, match="is a view"):
        buffer.place(view, 0)
    with pytest.raises(TensorError, match="another arena"):
        buffer.place(Arena(1).tensor(DType.F32, (4,)), 0)
    buffer.place(x, 0)
    with pytest.raises(TensorError, match="data already"):
        buffer.place(x, 32)
    late = arena.tensor(DType.F32, (1,))
    buffer.close()
    with pytest.raises(UseAfterCloseError):
        buffer.place(late, 64)


def test_wrap_refuses_addresses_and_nothing():
    arena = Arena(1)
    for memory in (aligned(256)[1:], aligned(256)[4:], aligned(0)):
        with pytest.raises(TensorError, match="memory of"):
            Buffer.wrap(arena, CPU, memory, 16)


def test_wrapped_memory_lives_as_long_as_the_tensor():
    arena = Arena(1)
    x = arena.tensor(DType.F32, (2**18,))
    Buffer.wrap(arena, CPU, aligned(2**20), 2**20).place(x, 0)
    x.set(np.arange(2**18, dtype=np.float32))
    other = [aligned(2**20) + 1 for _ in range(3)]
    assert np.array_equal(x.numpy()[0, 0, 0], np.arange(2**18))
    del other


def test_a_closed_arena_is_refused_and_nothing_leaks():
    arena = Arena(1)
    arena.tensor(DType.F32, (4,))
    arena.close()
    with pytest.raises(UseAfterCloseError):
        Buffer.allocate(arena, HOST, "test")
    with pytest.raises(UseAfterCloseError):
        Buffer.wrap(arena, CPU, aligned(64), 16)
    with pytest.raises(UseAfterCloseError):
        HOST.alloc_size(arena)


def test_a_closed_buffer_refuses_everything():
    arena = Arena(2)
    x = arena.tensor(DType.F32, (4,))
    buffer = Buffer.allocate(arena, HOST, "test")
    buffer.close()
    for use in (
        buffer.clear,
        buffer.mark_weights,
        buffer.__enter__,
        lambda: buffer.nbytes,
        lambda: buffer.is_host,
        lambda: buffer.adopt(x),
        lambda: buffer.host_view(x),
        lambda: buffer.place(arena.tensor(DType.F32, (1,)), 0),
    ):
        with pytest.raises((UseAfterCloseError, TensorError)) as caught:
            use()
        assert isinstance(caught.value, UseAfterCloseError) or "host view" in str(caught.value)
