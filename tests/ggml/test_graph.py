"""Graphs: order, budgets, and operands of other arenas."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graph import Bench

from pykv._native import ffi, lib
from pykv.errors import TensorError, UnsupportedOpError, UseAfterCloseError
from pykv.ggml import Arena, Buffer, Device, DType, Graph, Tensor, cpu_device, ops

CPU = cpu_device()


def names(graph: Graph) -> list[str]:
    return [ffi.string(lib.ggml_get_name(node)).decode() for node in graph.nodes()]


def test_nodes_come_in_the_order_of_computation_each_once():
    arena = Arena(16, 16)
    x = arena.tensor(DType.F32, (4,), "x")
    a = ops.tanh(arena, x).named("a")
    b = ops.add(arena, a, x).named("b")
    c = ops.mul(arena, b, a).named("c")
    graph = Graph(arena)
    graph.expand(b)
    graph.expand(c)
    graph.expand(c)
    assert names(graph) == ["a", "b", "c"]
    assert graph.n_nodes == 3


def test_an_arena_without_room_for_a_graph_or_with_one_already():
    with pytest.raises(TensorError, match="without room"):
        Graph(Arena(4))
    arena = Arena(4, 4)
    Graph(arena)
    with pytest.raises(TensorError, match="holds a graph already"):
        Graph(arena)
    arena.reset()
    Graph(arena)


def chain(arena: Arena, x: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = ops.tanh(arena, x)
    return x


def test_exactly_as_many_nodes_as_the_budget_and_no_more():
    arena = Arena(64, 5)
    graph = Graph(arena)
    x = chain(arena, arena.tensor(DType.F32, (4,)), 5)
    graph.expand(x)
    assert graph.n_nodes == 5
    with pytest.raises(TensorError, match="budget of 5 nodes"):
        graph.expand(chain(arena, x, 1))
    assert graph.n_nodes == 5


def test_exactly_as_many_leaves_as_the_budget_and_no_more():
    arena, lender = Arena(64, 4), Arena(8)
    graph = Graph(arena)
    x = arena.tensor(DType.F32, (4,))
    for _ in range(3):
        x = ops.add(arena, x, lender.tensor(DType.F32, (4,)))
    graph.expand(x)
    with pytest.raises(TensorError, match="budget of 4 nodes"):
        graph.expand(ops.add(arena, x, lender.tensor(DType.F32, (4,))))
    assert graph.n_nodes == 3


def test_a_borrowed_leaf_counts_once():
    arena, lender = Arena(64, 3), Arena(2)
    y = lender.tensor(DType.F32, (4,))
    x = y
    for _ in range(3):
        x = ops.add(arena, x, y)
    Graph(arena).expand(x)
    assert arena.n_borrowed == 1


def test_an_operand_computed_in_another_arena_is_refused():
    first, second = Arena(4, 4), Arena(4, 4)
    y = ops.tanh(first, first.tensor(DType.F32, (4,), "x")).named("y")
    with pytest.raises(TensorError, match=r"'y'.*computed in another arena"):
        ops.tanh(second, y)
    with pytest.raises(TensorError, match="computed in another arena"):
        Graph(second).expand(y)
    assert second.n_used == 0


def test_a_borrowed_tensor_keeps_its_arena():
    arena = Arena(4, 4)
    out = ops.tanh(arena, Arena(1).tensor(DType.F32, (4,), "lent"))
    graph = Graph(arena)
    graph.expand(out)
    assert arena.n_borrowed == 1
    assert graph.n_nodes == 1


def test_a_lone_leaf_of_another_arena():
    arena = Arena(1, 1)
    graph = Graph(arena)
    graph.expand(Arena(1).tensor(DType.F32, (4,)))
    assert graph.n_nodes == 0


def test_what_no_device_can_run_is_named():
    # the CPU multiplies f32 with f32, or with the type that the first is rounded to
    bench = Bench()
    a, b = bench.put(np.ones((2, 32), np.float32), DType.Q8_0), bench.put(np.ones((2, 32), np.float16))
    out = ops.mul_mat(bench.nodes, a.named("weights"), b.named("x")).named("product")
    told = r"MUL_MAT of q8_0 \(weights\), f16 \(x\) into f32 \(node 'product'\) cannot run on CPU"
    with pytest.raises(UnsupportedOpError, match=told), bench.computed(out):
        pass


def test_no_device_at_all_runs_nothing():
    arena = Arena(4, 4)
    graph = Graph(arena)
    graph.check_supported(())
    graph.expand(ops.tanh(arena, arena.tensor(DType.F32, (4,))))
    with pytest.raises(UnsupportedOpError):
        graph.check_supported(())
    graph.check_supported((CPU,))


def test_devices_answer_for_single_nodes():
    arena = Arena(8)
    x = arena.tensor(DType.F32, (32,))
    device: Device = CPU
    assert device.supports_op(ops.tanh(arena, x).ptr)
    half = arena.tensor(DType.F16, (32,))
    assert not device.supports_op(ops.mul_mat(arena, arena.tensor(DType.Q8_0, (32,)), half).ptr)


def test_a_closed_lender_is_found_before_anything_runs():
    lender = Arena(1)
    x = lender.tensor(DType.F32, (4,))
    buffer = Buffer.allocate(lender, CPU.buffer_type, "test")
    arena = Arena(4, 4)
    ops.tanh(arena, x)
    assert arena.check_borrowed() == [lender, buffer]
    buffer.close()
    with pytest.raises(UseAfterCloseError):
        arena.check_borrowed()
    other = Arena(2)
    ops.tanh(other, Arena(1).tensor(DType.F32, (4,)))
    with pytest.raises(TensorError, match="no data yet"):
        other.check_borrowed()
