"""Graph inputs: filled in place, refused once the memory is someone else's."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pykv.errors import TensorError, UseAfterCloseError
from pykv.ggml import Arena, Backend, Buffer, DType, Graph, GraphInput, GraphOutput, Sched, Tensor, cpu_device, ops

CPU = cpu_device()


@pytest.fixture
def sched():
    with Backend(CPU, 1) as backend, Sched([backend], 32) as sched:
        yield sched


def summing(kind: DType = DType.F32) -> tuple[Graph, GraphInput, Tensor]:
    arena = Arena(8, 8)
    one = GraphInput(arena.tensor(kind, (4, 3), "x"))
    out = ops.cont(arena, one.tensor).as_output()
    graph = Graph(arena)
    graph.expand(out)
    return graph, one, out


@pytest.mark.parametrize("kind", [DType.F32, DType.F16, DType.I32, DType.I64], ids=lambda t: t.label)
def test_what_is_written_is_what_is_read(sched, kind):
    graph, one, out = summing(kind)
    sched.allocate(graph)
    one.bind()
    assert one.array.shape == (1, 1, 3, 4)
    assert one.array.dtype == kind.numpy_dtype
    for value in (1, 2):
        one.array[...] = value * np.arange(12).reshape(3, 4)
        one.commit()
        sched.compute(graph)
        assert np.array_equal(out.numpy()[0, 0], value * np.arange(12).reshape(3, 4))


@pytest.mark.parametrize("kind", [DType.Q8_0, DType.BF16], ids=lambda t: t.label)
def test_types_that_numpy_lacks(kind):
    with pytest.raises(TensorError, match="cannot be filled"):
        GraphInput(Arena(1).tensor(kind, (32,), "x"))


def test_not_bound_or_bound_too_early(sched):
    graph, one, _ = summing()
    with pytest.raises(TensorError, match="not bound"):
        _ = one.array
    with pytest.raises(TensorError, match="no data yet"):
        one.bind()
    sched.allocate(graph)
    with pytest.raises(TensorError, match="not bound"):
        _ = one.array
    one.bind()
    one.array.fill(0)


def test_an_input_that_no_node_reads_gets_scratch(sched):
    graph, _, _ = summing()
    spare = GraphInput(graph.arena.tensor(DType.I32, (5,), "spare"))
    sched.allocate(graph)
    spare.bind()
    spare.array[...] = 7
    spare.commit()
    sched.compute(graph)


def test_the_array_is_refused_once_the_memory_is_taken_back(sched):
    graph, one, _ = summing()
    sched.allocate(graph)
    one.bind()
    sched.allocate(summing()[0])
    for use in (lambda: one.array, one.bind):
        with pytest.raises(TensorError, match="taken"):
            use()


def test_an_array_kept_beyond_its_scheduler_does_no_harm():
    graph, one, _ = summing()
    with Backend(CPU, 1) as backend:
        sched = Sched([backend], 32)
        sched.allocate(graph)
        one.bind()
        kept = one.array
        sched.close()
        kept[...] = 3  # the memory stays until the array goes
        assert kept.sum() == 36
        with pytest.raises(UseAfterCloseError):
            _ = one.array
        del sched
        gc.collect()
        kept[...] = 4
        with pytest.raises(UseAfterCloseError):
            one.bind()


def test_an_input_in_a_buffer():
    arena = Arena(1)
    x = arena.tensor(DType.F32, (4,))
    buffer = Buffer.allocate(arena, CPU.buffer_type, "test")
    buffer.adopt(x)
    one = GraphInput(x)
    one.bind()
    one.array[...] = 5
    one.commit()
    assert x.numpy().sum() == 20


def test_an_output_is_read_anew_after_each_compute(sched):
    graph, one, out = summing()
    output = GraphOutput(out)
    with pytest.raises(TensorError, match="no data yet"):
        output.bind()
    sched.allocate(graph)
    one.bind()
    output.bind()
    found = np.empty((2, 3, 4), np.float32)
    for value, rows in enumerate(found, 1):
        one.write(value * np.arange(12).reshape(3, 4))
        sched.compute(graph)
        output.read_into(rows)
    assert np.array_equal(found, np.arange(12).reshape(3, 4) * np.array([[[1]], [[2]]]))


def test_an_output_is_refused_once_the_memory_is_taken_back_or_closed(sched):
    graph, _, out = summing()
    output, rows = GraphOutput(out), np.empty((3, 4), np.float32)
    with pytest.raises(TensorError, match="no data yet"):
        output.read_into(rows)
    sched.allocate(graph)
    output.bind()
    sched.allocate(summing()[0])
    with pytest.raises(TensorError, match="taken"):
        output.read_into(rows)
    sched.close()
    with pytest.raises(UseAfterCloseError):
        output.read_into(rows)


def test_an_output_that_numpy_lacks_is_read_as_bytes(sched):
    arena = Arena(8, 8)
    x = arena.tensor(DType.BF16, (4,), "x").as_input()
    output, graph = GraphOutput(ops.cont(arena, x)), Graph(arena)
    graph.expand(output.tensor)
    sched.allocate(graph)
    output.bind()
    x.set(np.arange(8, dtype=np.uint8))
    sched.compute(graph)
    rows = np.empty(8, np.uint8)
    output.read_into(rows)
    assert rows.tolist() == list(range(8))


def in_a_buffer(*ne: int) -> tuple[Buffer, Tensor]:
    arena = Arena(4)
    x = arena.tensor(DType.F32, ne)
    buffer = Buffer.allocate(arena, CPU.buffer_type, "test")
    x.set(np.arange(x.n_elements, dtype=np.float32))
    return buffer, x


def as_it_is(x: Tensor) -> Tensor:
    return x


def last_row(x: Tensor) -> Tensor:
    return ops.view(x.arena, x, (4, 1, 1, 1), (x.nb[1],) * 3, 2 * x.nb[1])


def borrowed(x: Tensor) -> Tensor:
    return ops.view(Arena(1), x, x.ne, x.nb[1:])


@pytest.mark.parametrize("part", [as_it_is, last_row, borrowed])
def test_an_output_whose_buffer_is_closed_is_refused(part):
    buffer, x = in_a_buffer(4, 3)
    output = GraphOutput(part(x))
    output.bind()
    rows = np.zeros(tuple(reversed(output.tensor.ne)), np.float32)
    output.read_into(rows)
    assert rows.ravel()[-4:].tolist() == [8, 9, 10, 11]
    buffer.close()
    rows.fill(-1)
    with pytest.raises(UseAfterCloseError):
        output.read_into(rows)
    assert (rows == -1).all()


def test_an_output_in_a_buffer_of_an_arena_that_a_scheduler_served(sched):
    buffer, x = in_a_buffer(4, 3)
    arena = Arena(8, 8)
    output = GraphOutput(ops.view(arena, x, x.ne, x.nb[1:]))
    graph = Graph(arena)
    graph.expand(ops.cont(arena, output.tensor))
    sched.allocate(graph)
    output.bind()
    buffer.close()
    with pytest.raises(UseAfterCloseError):
        output.read_into(np.zeros((3, 4), np.float32))


def test_an_input_whose_buffer_is_closed_is_refused_and_a_kept_array_does_no_harm():
    buffer, x = in_a_buffer(1 << 20, 4)
    one = GraphInput(x)
    one.bind()
    kept = one.array
    buffer.close()
    for use in (lambda: one.array, lambda: one.write(np.zeros(1, np.float32)), one.bind):
        with pytest.raises(UseAfterCloseError):
            use()
    kept[...] = 3  # the memory stays until the array goes
    assert kept.max() == 3


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((3, 4), np.float32),
        np.zeros((3, 1, 4), np.float32),
        np.zeros((1, 1, 1, 1, 4), np.float32),
        np.zeros((4, 1), np.float32),
        np.zeros(3, np.float32),
        np.zeros((), np.float32),
        np.zeros(4, np.int64),
        np.zeros(4, np.int32),
        np.zeros(4, np.float64),
        np.broadcast_to(np.zeros((), np.float32), 4),
    ],
    ids=lambda out: f"{out.shape}-{out.dtype}-{out.flags.writeable}",
)
def test_an_array_that_does_not_fit_an_output_is_refused(out):
    _, x = in_a_buffer(4, 1)
    output = GraphOutput(x)
    for bind in (lambda: None, output.bind):
        bind()
        with pytest.raises(TensorError, match=r"out of shape .* is read into a writable array of shape \(1, 1, 1, 4\)"):
            output.read_into(out)
    assert not out.any()


def test_leading_ones_of_an_output_are_left_out_at_will():
    buffer, x = in_a_buffer(4, 1)
    output = GraphOutput(x)
    output.bind()
    for shape in ((4,), (1, 4), (1, 1, 4), (1, 1, 1, 4)):
        out = np.zeros(shape, np.float32)
        output.read_into(out)
        assert out.ravel().tolist() == [0, 1, 2, 3]
    buffer.close()
