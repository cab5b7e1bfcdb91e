"""The scheduler: what it accepts, what it holds, what it refuses after it has moved on."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import ParamError, TensorError, UseAfterCloseError
from pykv.ggml import Arena, Backend, Buffer, CancelFlag, DType, Graph, GraphInput, Sched, Tensor, cpu_device, ops

CPU = cpu_device()


@pytest.fixture
def backend():
    with Backend(CPU, 1) as backend:
        yield backend


@pytest.fixture
def sched(backend):
    with Sched([backend], 32) as sched:
        yield sched


def doubling(n: int = 4, lender: Arena | None = None) -> tuple[Graph, Tensor, Tensor]:
    """Return a graph, its input and its output."""
    arena = Arena(8, 8)
    x = (lender or arena).tensor(DType.F32, (n,), "x")
    out = ops.add(arena, x, x).as_output()
    graph = Graph(arena)
    graph.expand(out)
    return graph, x.as_input(), out


def test_it_computes_again_and_again(sched):
    graph, x, out = doubling()
    sched.allocate(graph)
    for value in (1, 2, 3):
        x.set(np.full(4, value, np.float32))
        sched.compute(graph)
        assert out.numpy()[0, 0, 0].tolist() == [2 * value] * 4
    assert sched.nbytes >= 16


def test_reserve_does_not_allocate(sched):
    graph, _, out = doubling(1000)
    assert sched.nbytes == 0
    sched.reserve(graph, "test")
    held = sched.nbytes
    assert held >= 4000
    with pytest.raises(TensorError, match="no data yet"):
        out.numpy()
    sched.allocate(graph)
    assert sched.nbytes == held


def test_only_the_allocated_graph_runs(sched):
    (first, x, _), (second, y, out) = doubling(), doubling()
    with pytest.raises(TensorError, match="not the one"):
        sched.compute(first)
    sched.allocate(first)
    with pytest.raises(TensorError, match="not the one"):
        sched.compute(second)
    sched.allocate(second)
    with pytest.raises(TensorError, match="not the one"):
        sched.compute(first)
    with pytest.raises(TensorError, match="taken"):
        x.set(np.zeros(4, np.float32))
    y.set(np.ones(4, np.float32))
    sched.compute(second)
    assert out.numpy().sum() == 8
    sched.reset()
    with pytest.raises(TensorError, match="not the one"):
        sched.compute(second)


def test_a_graph_is_allocated_once(backend, sched):
    graph, x, _ = doubling()
    sched.allocate(graph)
    with Sched([backend], 32) as other:
        for one in (sched, other):
            for use in (one.allocate, lambda g, one=one: one.reserve(g, "test")):
                with pytest.raises(TensorError, match="allocated before"):
                    use(graph)
    with pytest.raises(TensorError, match="cannot grow"):
        graph.expand(ops.tanh(graph.arena, x))
    with pytest.raises(TensorError, match="scheduler's memory"):
        Buffer.allocate(graph.arena, CPU.buffer_type, "test")
    sched.compute(graph)  # the refusals changed nothing


def test_an_arena_that_is_reset_serves_the_next_graph(sched):
    arena = Arena(8, 8)
    for n in (4, 4000, 40):
        sched.reset()
        arena.reset()
        x = arena.tensor(DType.F32, (n,)).as_input()
        out = ops.tanh(arena, x).as_output()
        graph = Graph(arena)
        graph.expand(out)
        sched.allocate(graph)
        x.set(np.ones(n, np.float32))
        sched.compute(graph)
        assert np.allclose(out.numpy(), np.tanh(1))


def test_a_graph_whose_arena_was_reset_does_not_run(sched):
    graph, _, _ = doubling()
    sched.allocate(graph)
    graph.arena.reset()
    with pytest.raises(UseAfterCloseError, match="reset"):
        sched.compute(graph)


def test_what_a_graph_reads_must_have_data_and_be_open(sched):
    lender = Arena(1)
    graph, x, out = doubling(lender=lender)
    for use in (sched.allocate, lambda g: sched.reserve(g, "test")):
        with pytest.raises(TensorError, match="no data yet"):
            use(graph)
    buffer = Buffer.allocate(lender, CPU.buffer_type, "test")
    sched.allocate(graph)
    sched.compute(graph)
    assert not out.numpy().any()
    buffer.close()
    with pytest.raises(UseAfterCloseError):
        sched.compute(graph)
    late = Arena(4, 4)
    other = Graph(late)
    other.expand(ops.tanh(late, x))
    with pytest.raises(UseAfterCloseError):
        sched.allocate(other)


@pytest.mark.parametrize("what", ["arena", "lender"])
def test_a_closed_arena_stops_the_graph(sched, what):
    lender = Arena(1)
    graph, x, _ = doubling(lender=lender)
    buffer = Buffer.allocate(lender, CPU.buffer_type, "test")
    buffer.adopt(x)
    sched.allocate(graph)
    (graph.arena if what == "arena" else lender).close()
    with pytest.raises(UseAfterCloseError):
        sched.compute(graph)


def test_memory_it_stands_on_stays_until_it_goes(backend):
    lender = Arena(1)
    x = lender.tensor(DType.F32, (4,))
    buffer = Buffer.allocate(lender, CPU.buffer_type, "test")
    sched = Sched([backend], 8, [buffer])
    buffer.close()
    sched.close()
    with pytest.raises(UseAfterCloseError, match="stands on"):
        Sched([backend], 8, [buffer])
    with pytest.raises(UseAfterCloseError):
        x.numpy()


def test_graphs_larger_than_the_scheduler(backend):
    arena = Arena(64, 40)
    graph = Graph(arena)
    with Sched([backend], 39) as sched:
        for use in (sched.allocate, lambda g: sched.reserve(g, "test")):
            with pytest.raises(TensorError, match="up to 40 nodes; the scheduler takes 39"):
                use(graph)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 64])
def test_a_full_graph_of_nodes_and_leaves_is_taken(backend, n):
    arena, lender = Arena(4 * n, n), Arena(n)
    x = lender.tensor(DType.F32, (4,))
    total = ops.tanh(arena, x)
    for _ in range(n - 1):
        total = ops.add(arena, total, lender.tensor(DType.F32, (4,)))
    graph = Graph(arena)
    graph.expand(total.as_output())
    assert graph.n_nodes == n
    with Buffer.allocate(lender, CPU.buffer_type, "test"), Sched([backend], n) as sched:
        sched.allocate(graph)
        sched.compute(graph)
        assert not total.numpy().any()


def test_backends_that_ggml_would_not_take(backend):
    with pytest.raises(ParamError, match="backends="):
        Sched([], 8)
    with pytest.raises(ParamError, match="1 to 16"):
        Sched([backend] * 17, 8)
    for size in (0, -1, 2**40):
        with pytest.raises(ParamError, match=f"graph_size={size}"):
            Sched([backend], size)


def test_a_closed_scheduler_refuses_everything(backend):
    sched = Sched([backend], 32)
    graph, x, _ = doubling()
    sched.allocate(graph)
    one = GraphInput(x)
    one.bind()
    sched.close()
    sched.close()
    for use in (
        sched.reset,
        sched.synchronize,
        sched.__enter__,
        lambda: sched.nbytes,
        lambda: sched.compute(graph),
        lambda: sched.allocate(doubling()[0]),
        lambda: sched.reserve(doubling()[0], "test"),
        lambda: one.array,
        one.bind,
        lambda: x.set(np.zeros(4, np.float32)),
    ):
        with pytest.raises(UseAfterCloseError):
            use()


def test_a_closed_backend_refuses_everything_but_its_scheduler_goes_on():
    backend = Backend(CPU, 2, CancelFlag())
    with Sched([backend], 32) as sched:
        backend.close()
        backend.close()
        for use in (backend.synchronize, backend.__enter__, lambda: backend.buffer_type, lambda: Sched([backend], 8)):
            with pytest.raises(UseAfterCloseError):
                use()
        graph, x, out = doubling()
        sched.allocate(graph)
        x.set(np.ones(4, np.float32))
        sched.compute(graph)
        assert out.numpy().sum() == 8


@pytest.mark.parametrize("n_threads", [-1, 513, 2**40])
def test_thread_counts_out_of_range(n_threads):
    with pytest.raises(ParamError, match=f"n_threads={n_threads}"):
        Backend(CPU, n_threads)


@pytest.mark.parametrize("n_threads", [0, 1, 2, 5])
def test_any_number_of_threads_gives_the_same_sums(n_threads):
    with Backend(CPU, n_threads) as backend, Sched([backend], 32) as sched:
        assert backend.buffer_type.is_host
        graph, x, out = doubling(1000)
        sched.allocate(graph)
        x.set(np.arange(1000, dtype=np.float32))
        sched.compute(graph)
        sched.synchronize()
        backend.synchronize()
        assert np.array_equal(out.numpy()[0, 0, 0], 2 * np.arange(1000))
