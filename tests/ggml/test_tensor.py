"""Tensors: reading and writing data, its bounds, and data that is gone."""

from __future__ import annotations

import mmap

import gguf
import numpy as np
import pytest
from support.cpu_graph import Bench

from pykv.errors import ConcurrentUseError, TensorError, UseAfterCloseError
from pykv.ggml import Arena, Backend, Buffer, DType, Graph, Sched, Tensor, cpu_device, from_float, ops

RNG = np.random.default_rng(11)
CPU = cpu_device()


def placed(dtype: DType, *ne: int) -> Tensor:
    """Return a tensor of zeros, whose buffer it keeps."""
    arena = Arena(4)
    tensor = arena.tensor(dtype, ne, "x")
    return Buffer.allocate(arena, CPU.buffer_type, "test").adopt(tensor)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64])
def test_set_and_numpy_of_every_plain_type(kind):
    values = (RNG.standard_normal((2, 3, 4)) * 50).astype(kind)
    x = placed(
        DType.parse({"float": "f", "int": "i"}[np.dtype(kind).name.rstrip("0123456789")] + str(values.itemsize * 8)),
        4,
        3,
        2,
    )
    x.set(values)
    assert x.numpy().dtype == kind
    assert np.array_equal(x.numpy()[0], values)
    assert x.raw_bytes().tobytes() == values.tobytes()


def test_new_memory_is_zero():
    assert not placed(DType.F32, 1000).numpy().any()


def test_numpy_is_a_copy():
    x = placed(DType.F32, 4)
    x.numpy()[:] = 7
    assert not x.numpy().any()


def test_quantised_data_comes_as_blocks_and_as_floats():
    values = RNG.standard_normal((3, 64)).astype(np.float32)
    x = placed(DType.Q8_0, 64, 3)
    x.set(from_float(DType.Q8_0, values))
    assert x.numpy().shape == (1, 1, 3, 68)
    assert x.numpy().dtype == np.uint8
    assert np.array_equal(x.to_f32()[0, 0], gguf.dequantize(x.numpy()[0, 0], gguf.GGMLQuantizationType.Q8_0))


def test_a_part_at_an_offset():
    x = placed(DType.I32, 4, 3)
    x.set(np.arange(3, dtype=np.int32), offset=20)
    out = np.empty(5, np.int32)
    x.get_into(out, offset=16)
    assert out.tolist() == [0, 0, 1, 2, 0]


def test_fill():
    x = placed(DType.I16, 5)
    x.fill(1)
    assert x.numpy()[0, 0, 0].tolist() == [257] * 5
    x.fill()
    assert not x.numpy().any()
    for value in (-1, 256):
        with pytest.raises(TensorError, match=f"value={value}"):
            x.fill(value)


@pytest.mark.parametrize(("n", "offset"), [(13, 0), (12, 4), (1, 48), (1, -4), (1, 2**64), (0, 52), (0, -1)])
def test_what_leaves_the_tensor_is_refused(n, offset):
    x = placed(DType.F32, 12)
    array = np.ones(n, np.float32)
    for use in (x.set, x.get_into):
        with pytest.raises(TensorError, match=r"leaves.*48 bytes"):
            use(array, offset)
    assert not x.numpy().any()


def test_arrays_that_are_not_contiguous_or_not_writable():
    x = placed(DType.F32, 12)
    with pytest.raises(TensorError, match="C-contiguous"):
        x.set(np.ones((3, 8), np.float32)[:, ::2])
    with pytest.raises(TensorError, match="C-contiguous"):
        x.get_into(np.ones((2, 6), np.float32).T)
    frozen = np.zeros(12, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(TensorError, match="writable"):
        x.get_into(frozen)


def test_an_empty_array_writes_nothing():
    x = placed(DType.F32, 4)
    x.set(np.empty(0, np.float32))
    x.get_into(np.empty(0, np.float32), offset=16)


def test_without_data():
    arena = Arena(2)
    x = arena.tensor(DType.F32, (4,), "bare")
    view = ops.reshape(arena, x, 2, 2)
    for t in (x, view):
        assert not t.is_allocated
        for use in (t.numpy, t.raw_bytes, t.to_f32, t.fill, lambda t=t: t.set(np.zeros(1, np.float32))):
            with pytest.raises(TensorError, match="no data yet"):
                use()


def test_a_view_made_before_its_base_has_data():
    arena, views = Arena(1), Arena(2)
    x = arena.tensor(DType.F32, (4,))
    early = ops.reshape(views, x, 2, 2)
    Buffer.allocate(arena, CPU.buffer_type, "test").adopt(x)
    with pytest.raises(TensorError, match="no data yet"):
        early.numpy()
    x.set(np.arange(4, dtype=np.float32))
    assert ops.reshape(views, x, 2, 2).numpy()[0, 0].tolist() == [[0, 1], [2, 3]]


def test_a_strided_view_has_no_array():
    arena = Arena(3)
    x = arena.tensor(DType.F32, (4, 3))
    buffer = Buffer.allocate(arena, CPU.buffer_type, "test")
    turned = ops.transpose(arena, buffer.adopt(x))
    for use in (turned.numpy, turned.to_f32):
        with pytest.raises(TensorError, match="strided"):
            use()
    with pytest.raises(TensorError, match="host view"):
        buffer.host_view(turned)


def test_contiguity():
    arena = Arena(8)
    x = arena.tensor(DType.F32, (4, 1, 3))
    assert ops.permute(arena, x, 0, 2, 1, 3).is_contiguous
    assert not ops.transpose(arena, arena.tensor(DType.F32, (4, 3))).is_contiguous
    assert not ops.view(arena, x, (2, 1, 3, 1), (x.nb[1], x.nb[2], x.nb[3])).is_contiguous


# data that is gone


def test_tensors_of_a_closed_buffer():
    arena = Arena(4)
    x = arena.tensor(DType.F32, (4,))
    buffer = Buffer.allocate(arena, CPU.buffer_type, "test")
    view = ops.reshape(Arena(1), x, 2, 2)
    x.numpy()  # also without `adopt`
    buffer.close()
    for t in (x, view):
        for use in (t.numpy, t.raw_bytes, t.to_f32, t.fill, t.check_data, lambda t=t: t.set(np.zeros(1, np.float32))):
            with pytest.raises(UseAfterCloseError):
                use()


def test_a_buffer_nobody_keeps_is_gone_and_its_tensors_say_so():
    arena = Arena(1)
    x = arena.tensor(DType.F32, (4,))
    Buffer.allocate(arena, CPU.buffer_type, "test")
    with pytest.raises(UseAfterCloseError):
        x.numpy()


def test_outputs_are_gone_when_the_scheduler_closes_or_moves_on():
    bench, other = Bench(), Bench()
    out = ops.tanh(bench.nodes, bench.put(np.ones(4, np.float32)))
    reshaped = ops.reshape(bench.nodes, out, 2, 2)
    with bench.computed(out, reshaped):
        assert np.allclose(reshaped.numpy(), np.tanh(1))
    for t in (out, reshaped):
        with pytest.raises(UseAfterCloseError):
            t.numpy()
    with Backend(CPU, 1) as backend, Sched([backend], 64) as sched:
        graphs = []
        for one in (bench, other):
            one.nodes.reset()
            graph = Graph(one.nodes)
            x = one.nodes.tensor(DType.F32, (4,)).as_input()
            y = ops.tanh(one.nodes, x).as_output()
            graph.expand(y)
            graphs.append((graph, y))
            sched.allocate(graph)
        with pytest.raises(TensorError, match="taken"):
            graphs[0][1].numpy()
        graphs[1][1].raw_bytes()
        sched.reset()
        with pytest.raises(TensorError, match="taken"):
            graphs[1][1].numpy()


# host views


def test_a_host_view_is_the_memory_itself():
    x = placed(DType.F32, 4, 3)
    view = x.owner.host_view(x)
    view[0, 0, 1, 2] = 5
    assert x.numpy()[0, 0, 1, 2] == 5
    x.set(np.full(12, 2, np.float32))
    assert (view == 2).all()


def test_a_buffer_with_host_views_does_not_close():
    x = placed(DType.F32, 4)
    buffer = x.owner
    part = buffer.host_view(x)[0, 0, 0, 1:3]  # a view of the view keeps the lease
    other = buffer.host_view(x)
    with pytest.raises(ConcurrentUseError, match="2 live host views"):
        buffer.close()
    part[:] = 3
    assert x.numpy()[0, 0, 0].tolist() == [0, 3, 3, 0]
    del other
    with pytest.raises(ConcurrentUseError, match="1 live"):
        buffer.close()
    del part
    buffer.close()
    buffer.close()
    with pytest.raises(UseAfterCloseError):
        buffer.host_view(x)


def test_a_host_view_outlives_every_name_of_its_buffer():
    x = placed(DType.F32, 4)
    view = x.owner.host_view(x)
    del x
    view[:] = 1
    assert view.sum() == 4


def test_tensors_without_a_host_view():
    x, other = placed(DType.F32, 4), placed(DType.F32, 4)
    with pytest.raises(TensorError, match="host view"):
        x.owner.host_view(other)
    for dtype in (DType.Q8_0, DType.BF16):
        y = placed(dtype, 32)
        with pytest.raises(TensorError, match="host view"):
            y.owner.host_view(y)


# read-only memory


def test_memory_that_is_mapped_read_only_is_never_written(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(np.arange(32, dtype=np.float32).tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arena = Arena(2)
    x, index = arena.tensor(DType.F32, (4, 4)), Arena(1).tensor(DType.I64, (4,))
    buffer = Buffer.wrap(arena, CPU, mapped, x.nbytes)
    buffer.place(x, 64)
    assert x.numpy().reshape(-1).tolist() == list(range(16, 32))
    assert x.is_read_only
    assert ops.reshape(arena, x, 16).is_read_only
    for use in (x.fill, buffer.clear, lambda: x.set(np.zeros(1, np.float32))):
        with pytest.raises(TensorError, match="read-only"):
            use()
    with pytest.raises(TensorError, match="set_rows: the memory is read-only"):
        ops.set_rows(Arena(2), x, Arena(1).tensor(DType.F32, (4, 4)), index)
    view = buffer.host_view(x)
    with pytest.raises(ValueError, match="read-only"):
        view[:] = 0
    with pytest.raises(BufferError):
        mapped.close()  # as long as it is wrapped
    del view
    buffer.close()
    mapped.close()
