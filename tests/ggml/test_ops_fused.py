"""pykv's attention kernel against attention in float64, on every instruction set that this machine has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.child import run_cleanly
from support.cpu_graph import Bench
from support.fused_case import FUSED_CASES, MASKS, TYPES, FusedCase
from support.naive_attention import dense_attention
from support.nmse import nmse

from pykv._native import ffi, lib
from pykv.errors import ComputeCancelled, TensorError, UseAfterCloseError
from pykv.ggml import Arena, Backend, Buffer, CancelFlag, DType, Graph, Sched, cpu_device, ops

CLOSE = 1e-11
"""NMSE against float64 of sums in f32; measured at most 1e-12."""

CODED = 1e-7
"""The same where the query is rounded to 16 bits, for K that is stored as scaled codes; measured at most 1e-8."""

ISAS = [isa for isa in (b"portable", b"avx2", b"avx512", b"neon") if lib.pykv_attn_use_isa(isa)]


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    lib.pykv_attn_use_isa(ffi.NULL)
    yield
    lib.pykv_attn_use_isa(ffi.NULL)


def check(case: FusedCase) -> None:
    """Compare with float64 on every instruction set; zeros must be zeros."""
    expected = case.expected()
    most = CODED if case.type_k in (DType.Q8_0, DType.Q4_0) else CLOSE
    for isa in ISAS:
        assert lib.pykv_attn_use_isa(isa)
        got = case.output()
        assert got.shape == expected.shape
        assert np.isfinite(got).all(), isa
        assert not got[expected == 0].any(), isa
        assert nmse(got, expected) <= most if expected.any() else not got.any(), isa


@settings(max_examples=60, deadline=None)
@given(FUSED_CASES)
@example(FusedCase(n_kv=1, n_rows=1, n_head_kv=1, group=1))
@example(FusedCase(type_k=DType.Q8_0, type_v=DType.Q8_0, head_k=576, head_v=512, n_head_kv=1, group=16, v_in_k=True))
def test_any_shape_attends_as_numpy_does(case: FusedCase) -> None:
    check(case)


@pytest.mark.parametrize("type_v", TYPES, ids=lambda t: t.label)
@pytest.mark.parametrize("type_k", TYPES, ids=lambda t: t.label)
def test_keys_and_values_of_every_type(type_k: DType, type_v: DType) -> None:
    check(FusedCase(type_k, type_v, 64, 32, n_kv=70, n_rows=2))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("n_rows", [1, 5, 16, 40])
def test_what_a_mask_hides_is_not_seen(mask: str, n_rows: int) -> None:
    """Rows that see nothing are zeros, not NaN; with sinks they are zeros too."""
    for sinks in (False, True):
        check(FusedCase(mask=mask, n_rows=n_rows, n_stream=2, n_kv=200, sinks=sinks, spare=True))


@settings(max_examples=25, deadline=None)
@given(FUSED_CASES, st.integers(2, 16))
def test_the_number_of_threads_changes_no_bit(case: FusedCase, n_threads: int) -> None:
    assert np.array_equal(case.output(), case.output(n_threads))


@pytest.mark.parametrize("type_v", [DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0], ids=lambda t: t.label)
@pytest.mark.parametrize("type_k", [DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0], ids=lambda t: t.label)
def test_it_is_at_least_as_exact_as_ggmls(type_k: DType, type_v: DType) -> None:
    case = FusedCase(type_k, type_v, 128, 128, n_kv=700, n_rows=2)
    expected = case.expected()
    assert nmse(case.output(), expected) <= nmse(case.flash(), expected)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.label)
@pytest.mark.parametrize("n_unwritten", [1, 64, 150])
def test_cells_that_no_query_sees_may_hold_anything(dtype: DType, n_unwritten: int) -> None:
    """What was never written may be NaN; the window ends behind it."""
    check(FusedCase(dtype, dtype, mask="window", n_kv=200, n_rows=3, n_unwritten=n_unwritten))


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("n_rows", [2, 20])
def test_what_is_no_number_spoils_those_who_see_it_and_no_others(n_rows: int, name: str) -> None:
    """Two sequences take turns in one pool of cells; a cell of the second holds NaN, the first one in its block."""
    case = FusedCase(n_kv=150, n_rows=n_rows, mask="none")
    values = case._values()
    values["mask"] = np.where(np.arange(150) % 2 == np.arange(n_rows)[:, None] % 2, 0, -np.inf).astype(np.float32)[None]
    values["mask"][:, 1::2, 64:129] = -np.inf
    values["mask"][:, 1::2, 129] = 0
    values[name][:, 129] = np.nan
    for isa in ISAS:
        assert lib.pykv_attn_use_isa(isa)
        bench = Bench()
        q, k, v, mask = (bench.put(x) for x in (values["q"], values["k"], values["v"], values["mask"][:, None]))
        out = ops.fused_attn(bench.nodes, q, k, v, mask, scale=case.scale)
        with bench.computed(out):
            got = out.numpy()[0]
        clean = {one: np.nan_to_num(values[one]) for one in ("k", "v")}
        expected = dense_attention(values["q"], clean["k"], clean["v"], values["mask"], scale=case.scale)[0]
        assert np.isnan(got[1::2]).all()
        assert nmse(got[::2], expected[::2]) <= CLOSE


def test_one_mask_serves_all_streams() -> None:
    case = FusedCase(n_stream=1, n_rows=3)
    values = case._values()
    bench = Bench()
    q, k, v = (bench.put(np.repeat(values[name], 2, axis=0)) for name in ("q", "k", "v"))
    out = ops.fused_attn(bench.nodes, q, k, v, bench.put(values["mask"][:, None]), scale=case.scale)
    alone = Bench()
    q, k, v, mask = (alone.put(x) for x in (values["q"], values["k"], values["v"], values["mask"][:, None]))
    first = ops.fused_attn(alone.nodes, q, k, v, mask, scale=case.scale)
    with bench.computed(out), alone.computed(first):
        assert np.array_equal(out.numpy(), np.repeat(first.numpy(), 2, axis=0))


# nodes, memory, cancelling


def operands(arena: Arena, **change: tuple[int, ...]) -> dict:
    """Return operands that fit, or with another shape."""
    shapes = {"q": (64, 6, 2, 1), "k": (64, 2, 70, 1), "v": (32, 2, 70, 1), "mask": (70, 2, 1, 1)} | change
    kinds = {"q": DType.F32, "k": DType.F16, "v": DType.F16, "mask": DType.F16, "sinks": DType.F32}
    return {name: arena.tensor(kinds[name], ne) for name, ne in shapes.items()}


def test_two_nodes_count_in_the_budget() -> None:
    arena = Arena(5, 5)
    given = operands(arena)
    with pytest.raises(TensorError, match="its budget is 5 tensors"):
        ops.fused_attn(arena, **given, scale=1.0)
    arena = Arena(6, 6)
    graph = Graph(arena)
    graph.expand(ops.fused_attn(arena, **operands(arena), scale=1.0).as_output())
    assert (arena.n_used, graph.n_nodes) == (6, 2)


def test_many_rows_take_one_node_and_no_scratch() -> None:
    arena = Arena(5, 5)
    graph = Graph(arena)
    out = ops.fused_attn(arena, **operands(arena, q=(64, 6, 17, 1), mask=(70, 17, 1, 1)), scale=1.0)
    graph.expand(out.as_output())
    assert (arena.n_used, graph.n_nodes, out.ne) == (5, 1, (32, 6, 17, 1))


def test_what_the_nodes_point_to_lives_as_long_as_the_arenas_graph() -> None:
    arena = Arena(6, 6)
    out = ops.fused_attn(arena, **operands(arena), scale=0.5)
    (params,) = map(weakref.ref, arena._kept)
    gc.collect()
    assert params().scale == 0.5
    assert out.ne == (32, 6, 2, 1)
    arena.reset()
    gc.collect()
    assert params() is None


def test_it_can_be_cancelled() -> None:
    arena, flag = Arena(12, 12), CancelFlag()
    graph = Graph(arena)
    graph.expand(ops.fused_attn(arena, **operands(arena), scale=1.0).as_output())
    with Backend(cpu_device(), 1, flag) as backend, Sched([backend], 12) as sched:
        sched.allocate(graph)
        flag.set()
        with pytest.raises(ComputeCancelled):
            sched.compute(graph)
        flag.clear()
        sched.compute(graph)


# refusals


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"q": (32, 6, 2, 1)}, "queries that do not fit K"),
        ({"q": (64, 6, 2, 2)}, "queries that do not fit K"),
        ({"q": (64, 5, 2, 1)}, "no multiple of KV heads"),
        ({"q": (64, 6, 2**32 + 2, 1)}, "so large a batch"),
        ({"q": (64, 6, 2, 2**32 + 1), "k": (64, 2, 70, 2**32 + 1)}, "so large a batch"),
        ({"k": (64, 2**32 + 2, 70, 1), "v": (32, 2**32 + 2, 70, 1)}, "so large a batch"),
        ({"k": (64, 2, 2**32 + 70, 1), "v": (32, 2, 2**32 + 70, 1)}, "so large a batch"),
        ({"k": (64, 2, 71, 1)}, "K and V of different shape"),
        ({"k": (64, 1, 70, 1)}, "K and V of different shape"),
        ({"v": (32, 2, 70, 2)}, "K and V of different shape"),
        ({"v": (24, 2, 70, 1)}, "multiple of 16"),
        ({"v": (8, 2, 70, 1)}, "narrower than 16"),
        ({"q": (592, 6, 2, 1), "k": (592, 2, 70, 1)}, "wider than 576"),
        ({"mask": (69, 2, 1, 1)}, "a mask of this shape"),
        ({"mask": (70, 1, 1, 1)}, "a mask of this shape"),
        ({"mask": (70, 2, 6, 1)}, "a mask of this shape"),
        ({"mask": (70, 2, 1, 2)}, "a mask of this shape"),
        ({"sinks": (5,)}, "sinks that are not one f32 a head"),
    ],
    ids=str,
)
def test_shapes_that_are_not_covered(change: dict, why: str) -> None:
    arena = Arena(16)
    given = operands(arena, **change)
    assert why in str(ops.fused_attn_misfit(**given))
    with pytest.raises(TensorError, match=f"fused_attn: does not cover .*{why}"):
        ops.fused_attn(arena, **given, scale=1.0)
    assert arena.n_used == len(given)


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("q", DType.F16, "queries that are not runs of f32"),
        ("k", DType.I32, "this type of K or V"),
        ("v", DType.F64, "this type of K or V"),
        ("v", DType.I8, "this type of K or V"),
        ("mask", DType.BF16, "neither f16 nor f32"),
        ("sinks", DType.F16, "sinks that are not one f32 a head"),
    ],
)
def test_types_that_are_not_covered(name: str, dtype: DType, why: str) -> None:
    arena = Arena(16)
    given = operands(arena, sinks=(6,))
    given[name] = arena.tensor(dtype, given[name].ne)
    with pytest.raises(TensorError, match=f"fused_attn: does not cover .*{why}"):
        ops.fused_attn(arena, **given, scale=1.0)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_rows_that_are_not_dense(name: str) -> None:
    arena = Arena(16)
    given = operands(arena)
    tensor = given[name]
    turned = arena.tensor(tensor.dtype, (tensor.ne[1], tensor.ne[0], *tensor.ne[2:]))
    given[name] = ops.transpose(arena, turned)
    assert given[name].ne == tensor.ne
    with pytest.raises(TensorError, match=r"fused_attn: does not cover .*runs"):
        ops.fused_attn(arena, **given, scale=1.0)


def test_quantised_heads_that_are_half_a_block() -> None:
    arena = Arena(16)
    given = operands(arena)
    rows = arena.tensor(DType.Q8_0, (96, 70))
    given["k"] = ops.view(arena, rows, (64, 1, 70, 1), (rows.nb[1], rows.nb[1], rows.nb[2]))
    given["v"] = ops.view(arena, rows, (32, 1, 70, 1), (rows.nb[1], rows.nb[1], rows.nb[2]))
    assert ops.fused_attn_misfit(**given) is None


def test_an_operand_of_an_arena_that_was_reset() -> None:
    arena, other = Arena(16), Arena(4)
    given = operands(arena) | {"v": other.tensor(DType.F16, (32, 2, 70, 1))}
    other.reset()
    with pytest.raises(UseAfterCloseError, match="its arena was reset"):
        ops.fused_attn(arena, **given, scale=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", float("nan")), ("scale", float("inf")), ("scale", 1e39), ("scale", "x"), ("scale", True),
        ("logit_softcap", -1.0), ("logit_softcap", float("nan")), ("max_bias", -1.0), ("max_bias", float("inf")),
    ],
)  # fmt: skip
def test_parameters_that_make_every_score_nan(name: str, value: object) -> None:
    arena = Arena(16)
    given = operands(arena)
    for op, more in ((ops.fused_attn, ()), (ops.fused_attn_masses, ([ops.MassOf()],))):
        with pytest.raises(TensorError, match=f"{op.__name__}: {name} = "):
            op(arena, *given.values(), *more, **({"scale": 1.0} | {name: value}))
    assert arena.n_used == len(given)


@pytest.mark.parametrize(("asked", "is_told"), [("avx9", True), ("", True), ("portable", False), (None, False)])
def test_an_instruction_set_that_is_not_there_was_taken_for_granted(asked: str | None, is_told: bool) -> None:
    code = """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        from pykv.ggml import ops
        for _ in range(2):
            print(ops.fused_isa())
    """
    environment = {} if asked is None else {"PYKV_ATTENTION_ISA": asked}
    *told, first, second = run_cleanly(code, environment=environment).splitlines()
    assert first == second
    if asked == "portable":
        assert first == "portable"
    warning = f"WARNING PYKV_ATTENTION_ISA={asked!r}: this machine or build has no such kernel; {first} is used"
    assert told == ([warning] if is_told else [])


def compute_nbytes(n_kv: int) -> int:
    """Return the compute memory of one attention over so many cells; its operands lie elsewhere."""
    stored, graph = Arena(8), Graph(Arena(8, 8))
    ne = {"q": (16, 16, 16, 1), "k": (16, 16, n_kv, 1), "v": (16, 16, n_kv, 1), "mask": (n_kv, 16, 1, 1)}
    given = operands(stored, **ne)
    with (
        Buffer.allocate(stored, cpu_device().buffer_type, "operands"),
        Backend(cpu_device(), 1) as backend,
        Sched([backend], 8) as sched,
    ):
        graph.expand(ops.fused_attn(graph.arena, **given, scale=1.0).as_output())
        sched.reserve(graph, "test")
        return sched.nbytes


def test_fewer_cells_took_more_scratch_than_what_was_reserved_for_all() -> None:
    """4096 cells are cut into more runs than 4352."""
    sizes = [compute_nbytes(n_kv) for n_kv in range(256, 10240 + 1, 256)]
    assert sizes == sorted(sizes)
