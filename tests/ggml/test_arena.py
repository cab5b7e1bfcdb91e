"""Arenas: the budget, dims, names, and tensors that are gone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv.errors import AllocError, TensorError, UseAfterCloseError
from pykv.ggml import Arena, DType, Graph, ops, pools


@given(n=st.integers(1, 60), graph_size=st.one_of(st.just(0), st.integers(1, 3000)), graph_at=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_the_budget_holds_exactly_what_it_says(n, graph_size, graph_at):
    arena = Arena(n, graph_size)
    for i in range(n):
        if graph_size and i == min(graph_at, n - 1):
            Graph(arena)
        arena.tensor(DType.F32, (2, 3, 4, 5), "n" * 63)
    with pytest.raises(TensorError, match=f"budget is {n} tensors"):
        arena.tensor(DType.F32, (1,))
    assert arena.n_used == n


def test_nodes_count_like_tensors():
    arena = Arena(3)
    x = arena.tensor(DType.F32, (4,))
    ops.add(arena, ops.add(arena, x, x), x)
    with pytest.raises(TensorError, match="full"):
        ops.add(arena, x, x)


def test_a_graph_fits_behind_a_full_arena():
    arena = Arena(2, 7)
    y = ops.tanh(arena, arena.tensor(DType.F32, (4,)))
    graph = Graph(arena)
    graph.expand(y)
    assert graph.n_nodes == 1


def test_a_refused_tensor_costs_nothing():
    arena = Arena(1)
    with pytest.raises(TensorError):
        arena.tensor(DType.Q8_0, (33,))
    with pytest.raises(TensorError):
        arena.tensor(DType.F32, (0,))
    arena.tensor(DType.F32, (1,))


@pytest.mark.parametrize(("n", "graph_size"), [(0, 0), (-1, 0), (1, -1), (2**31, 0), (1, 2**31), (2**64, 0)])
def test_sizes_out_of_range(n, graph_size):
    with pytest.raises(TensorError, match=f"n_tensors={n} and graph_size={graph_size}"):
        Arena(n, graph_size)


def test_no_memory_is_an_error_and_not_the_end(monkeypatch):
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pools, "_new_pool", refuse)
    with pytest.raises(AllocError, match="arena of 10 tensors") as caught:
        Arena(10)
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize(
    "ne", [(), (1, 1, 1, 1, 1), (0,), (-1,), (4, 0), (4, -2, -1), (2**63,), (2**32, 2**32), (2**61,), (2**20,) * 4]
)
def test_dims_out_of_range(ne):
    with pytest.raises(TensorError, match="ne="):
        Arena(1).tensor(DType.F32, ne)


def test_the_largest_tensor_counts_its_bytes_exactly():
    big = Arena(1).tensor(DType.F32, (2**30, 2**30))
    assert big.nbytes == 2**62
    assert big.n_elements == 2**60


@pytest.mark.parametrize("dtype", list(DType), ids=lambda t: t.label)
def test_strides_of_every_type(dtype):
    n = dtype.block_size * 3
    x = Arena(1).tensor(dtype, (n, 5, 2))
    row = dtype.type_size * 3
    assert (x.ne, x.nb) == ((n, 5, 2, 1), (dtype.type_size, row, row * 5, row * 10))
    assert x.nbytes == row * 10
    assert x.is_contiguous


def test_names():
    arena = Arena(8)
    assert arena.tensor(DType.F32, (1,), "blk.0.attn_q").name == "blk.0.attn_q"
    assert arena.tensor(DType.F32, (1,)).name == ""
    assert arena.tensor(DType.F32, (1,), "x" * 100).name == "x" * 63
    assert arena.tensor(DType.F32, (1,), "é" * 40).name.startswith("é" * 31)
    assert "'größe', q8_0, [32, 1, 1, 1]" in repr(arena.tensor(DType.Q8_0, (32,), "größe"))


def test_tensors_and_graph_of_before_a_reset_are_gone():
    arena = Arena(4, 8)
    x = arena.tensor(DType.F32, (4,), "old")
    y = ops.tanh(arena, x)
    graph = Graph(arena)
    arena.reset()
    for use in (
        lambda: x.ptr,
        lambda: x.name,
        x.numpy,
        x.check_data,
        lambda: ops.tanh(arena, y),
        lambda: graph.n_nodes,
        lambda: graph.expand(y),
    ):
        with pytest.raises(UseAfterCloseError, match="gone"):
            use()
    assert arena.n_used == 0
    Graph(arena).expand(ops.tanh(arena, arena.tensor(DType.F32, (4,))))


def test_a_closed_arena_refuses_everything():
    arena = Arena(4, 8)
    x, graph = arena.tensor(DType.F32, (4,), "x"), Graph(arena)
    arena.close()
    arena.close()
    assert arena.closed
    for use in (
        arena.reset,
        arena.__enter__,
        lambda: arena.ptr,
        lambda: arena.tensor(DType.F32, (1,)),
        lambda: Graph(Arena(1, 1)) and graph.n_nodes,
        lambda: graph.expand(x),
        lambda: list(graph.nodes()),
        lambda: graph.check_supported(()),
        lambda: x.name,
        lambda: x.nbytes,
        lambda: x.named("y"),
        x.as_input,
        x.as_output,
        lambda: x.is_allocated,
        x.fill,
        x.raw_bytes,
        x.numpy,
        x.to_f32,
        lambda: ops.tanh(arena, x),
        lambda: ops.tanh(Arena(1), x),
    ):
        with pytest.raises(UseAfterCloseError):
            use()


def test_a_with_block_closes():
    with Arena(1) as arena:
        arena.tensor(DType.F32, (1,))
    assert arena.closed
