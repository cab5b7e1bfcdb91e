"""Choice of experts, and products with the chosen ones, against numpy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from support.cpu_graph import run
from support.nmse import nmse

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, from_float, ops

RNG = np.random.default_rng(21)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def stored(x: np.ndarray, dtype: DType) -> np.ndarray:
    raw = from_float(dtype, x).reshape(*x.shape[:-1], -1)
    return gguf.dequantize(raw, gguf.GGMLQuantizationType(int(dtype)))


def choice(n_expert: int, n_tokens: int, n_used: int) -> np.ndarray:
    """Return different experts for each token, (n_tokens, n_used)."""
    return np.argsort(RNG.random((n_tokens, n_expert)))[:, :n_used].astype(np.int32)


@pytest.mark.parametrize(("m", "k"), [(1, 1), (8, 1), (8, 3), (8, 8), (130, 6)])
def test_argsort_top_k(m, k):
    x = normal(2, 3, m)
    out = run(lambda c, a: ops.cont(c, ops.argsort_top_k(c, a, k)), x)[0]
    assert out.dtype == np.int32
    assert np.array_equal(out, np.argsort(-x, axis=-1)[..., :k])


def test_argsort_of_infinities_and_nan_is_a_permutation():
    x = normal(1, 40)
    x[0, 3], x[0, 7], x[0, 11] = np.nan, -np.inf, np.inf
    out = run(lambda c, a: ops.argsort_top_k(c, a, 40), x)
    assert sorted(out.reshape(-1).tolist()) == list(range(40))


WEIGHTS = [DType.F32, DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0, DType.MXFP4]


@pytest.mark.parametrize("dtype", WEIGHTS, ids=lambda t: t.label)
@pytest.mark.parametrize(("n_tokens", "n_used", "n_in"), [(1, 2, 1), (5, 3, 1), (5, 3, 3), (40, 4, 2)])
def test_mul_mat_id(dtype, n_tokens, n_used, n_in):
    weights, x, index = normal(6, 24, 64), normal(n_tokens, n_in, 64), choice(6, n_tokens, n_used)
    out = run(ops.mul_mat_id, (weights, dtype), x, index)[0]
    columns = np.tile(x.astype(np.float64), (1, n_used // n_in, 1))
    expect = np.einsum("tumk,tuk->tum", stored(weights, dtype)[index].astype(np.float64), columns)
    # quantised kernels round x to 8 bits a block
    assert nmse(out, expect) < (1e-4 if dtype.is_quantized else 2e-5)


def test_add_id():
    x, bias, index = normal(5, 3, 20), normal(6, 20), choice(6, 5, 3)
    assert np.array_equal(run(ops.add_id, x, bias, index)[0], x + bias[index])


def test_a_computed_choice_reads_rows_and_matrices():
    scores, weights, x = normal(5, 8), normal(8, 12, 16), normal(5, 1, 16)

    def build(c: Arena, scores: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        chosen = ops.argsort_top_k(c, scores, 2)
        shares = ops.get_rows(c, ops.reshape(c, scores, 1, 8, 5), chosen)  # [1, 2, 5]
        return ops.mul(c, ops.mul_mat_id(c, weights, x, chosen), shares)

    chosen = np.argsort(-scores)[:, :2]
    products = np.einsum("tumk,tk->tum", weights[chosen].astype(np.float64), x[:, 0])
    expect = products * np.take_along_axis(scores, chosen, 1)[..., None]
    assert np.allclose(run(build, scores, weights, x)[0], expect, rtol=1e-4, atol=1e-4)


def test_groups_are_masked_by_a_computed_choice():
    scores = normal(4, 3, 5)  # tokens, groups, experts

    def build(c: Arena, scores: Tensor) -> Tensor:
        best = ops.sum_rows(c, scores)  # [1, 3, 4]
        groups = ops.argsort_top_k(c, ops.reshape(c, best, 3, 4), 2)
        kept = ops.get_rows(c, scores, groups)
        return ops.set_rows(c, ops.fill(c, scores, -np.inf), kept, groups)

    groups = np.argsort(-scores.sum(-1))[:, :2]
    keep = np.zeros((4, 3), bool)
    np.put_along_axis(keep, groups, True, 1)
    assert np.array_equal(run(build, scores)[0], np.where(keep[..., None], scores, -np.inf))


# refusals


@pytest.fixture
def arena() -> Arena:
    return Arena(256)


@pytest.mark.parametrize("k", [0, -1, 9])
def test_argsort_refuses_a_number_that_a_row_has_not(arena, k):
    with pytest.raises(TensorError, match=f"argsort_top_k: k={k}"):
        ops.argsort_top_k(arena, arena.tensor(DType.F32, (8, 3)), k)


def test_argsort_refuses_types_and_layouts(arena):
    with pytest.raises(TensorError, match="wants f32"):
        ops.argsort_top_k(arena, arena.tensor(DType.F16, (8, 3)), 2)
    x = arena.tensor(DType.F32, (8, 3, 4))
    for axes in ((1, 0, 2, 3), (0, 2, 1, 3)):
        with pytest.raises(TensorError, match="evenly"):
            ops.argsort_top_k(arena, ops.permute(arena, x, *axes), 2)


FITTING = {
    "mul_mat_id": [(DType.F32, (16, 4, 6)), (DType.F32, (16, 3, 5)), (DType.I32, (3, 5))],
    "add_id": [(DType.F32, (16, 3, 5)), (DType.F32, (16, 6)), (DType.I32, (3, 5))],
}


@pytest.mark.parametrize("op", FITTING)
def test_shapes_that_do_not_fit(arena, op):
    getattr(ops, op)(arena, *(arena.tensor(*one) for one in FITTING[op]))
    free = {("mul_mat_id", 0, 1), ("mul_mat_id", 0, 2), ("add_id", 1, 1)}  # rows, and how many experts there are
    for i, (_, ne) in enumerate(FITTING[op]):
        for dim in range(4):
            if (op, i, dim) in free:
                continue
            wrong = [(kind, tuple(n + (d == dim) for d, n in enumerate((*ne, 1, 1)[:4]))) for kind, ne in FITTING[op]]
            operands = [arena.tensor(*(wrong[j] if j == i else one)) for j, one in enumerate(FITTING[op])]
            with pytest.raises(TensorError, match=f"{op}: shapes"):
                getattr(ops, op)(arena, *operands)


@pytest.mark.parametrize("op", FITTING)
def test_layouts_and_types_that_do_not_fit(arena, op):
    fitting = [arena.tensor(*one) for one in FITTING[op]]
    for i in range(2):
        n0, n1, *rest = FITTING[op][i][1]
        operands = list(fitting)
        operands[i] = ops.transpose(arena, arena.tensor(DType.F32, (n1, n0, *rest)))
        if n1 > 1:
            with pytest.raises(TensorError, match=f"{op}: .*layouts"):
                getattr(ops, op)(arena, *operands)
        operands[i] = arena.tensor(DType.I32, FITTING[op][i][1])
        with pytest.raises(TensorError, match=f"{op}: wants"):
            getattr(ops, op)(arena, *operands)
    with pytest.raises(TensorError, match=f"{op}: wants i32"):
        getattr(ops, op)(arena, *fitting[:2], arena.tensor(DType.I64, FITTING[op][2][1]))


def test_weights_of_types_without_a_kernel(arena):
    _, x, index = (arena.tensor(*one) for one in FITTING["mul_mat_id"])
    for kind in (DType.I32, DType.F64):
        with pytest.raises(TensorError, match="mul_mat_id: wants"):
            ops.mul_mat_id(arena, arena.tensor(kind, (16, 4, 6)), x, index)


def test_an_expert_that_does_not_exist_is_named():
    index = np.array([[0, 6]], np.int32)
    with pytest.raises(TensorError, match="6 names no row; they are 0 to 5"):
        run(ops.mul_mat_id, normal(6, 4, 16), normal(1, 1, 16), index)
    with pytest.raises(TensorError, match="6 names no row; they are 0 to 5"):
        run(ops.add_id, normal(1, 2, 16), normal(6, 16), index)


def test_a_computed_choice_among_more_than_there_are(arena):
    chosen = ops.argsort_top_k(arena, arena.tensor(DType.F32, (7, 5)), 3)
    a, x, _ = (arena.tensor(*one) for one in FITTING["mul_mat_id"])
    with pytest.raises(TensorError, match="over 7 rows, and there are 6"):
        ops.mul_mat_id(arena, a, x, chosen)
    with pytest.raises(TensorError, match="over 7 rows, and there are 6"):
        ops.add_id(arena, *(arena.tensor(*one) for one in FITTING["add_id"][:2]), chosen)
    with pytest.raises(TensorError, match="over 7 rows, and there are 6"):
        ops.get_rows(arena, arena.tensor(DType.F32, (4, 6, 5)), chosen)


def test_indices_that_something_else_computes(arena):
    a, x, index = (arena.tensor(*one) for one in FITTING["mul_mat_id"])
    with pytest.raises(TensorError, match="computed"):
        ops.mul_mat_id(arena, a, x, ops.cont(arena, index))
    chosen = ops.cont(arena, ops.argsort_top_k(arena, arena.tensor(DType.F32, (6, 5)), 3))
    with pytest.raises(TensorError, match="computed"):
        ops.mul_mat_id(arena, a, x, chosen)
