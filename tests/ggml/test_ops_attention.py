"""Softmax with masks and fused attention against numpy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from support.cpu_graph import run
from support.nmse import nmse

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, from_float, ops

RNG = np.random.default_rng(10)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def causal_mask(n_stream: int, n: int, n_kv: int) -> np.ndarray:
    """Return (n_stream, 1, n, n_kv): query i sees the first n_kv - n + i + 1 - stream cells."""
    cell, query, stream = np.arange(n_kv), np.arange(n)[:, None], np.arange(n_stream)[:, None, None]
    return np.where(cell <= n_kv - n + query - stream, 0, -np.inf).astype(np.float32)[:, None]


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """Return the slopes of Press et al. 2022, with the authors' rule for head counts that are no power of two."""
    if max_bias == 0:
        return np.ones(n_head)
    power = 2 ** int(np.floor(np.log2(n_head)))
    first = [2 ** (-max_bias / power * (h + 1)) for h in range(power)]
    between = [2 ** (-max_bias / (2 * power) * (2 * h + 1)) for h in range(n_head - power)]
    return np.array(first + between)


def softmax(x: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Return softmax of x (..., H, n, m), beside one more score for each of H that is left out."""
    if sinks is None:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    column = np.broadcast_to(sinks[:, None, None].astype(np.float64), (*x.shape[:-1], 1))
    return softmax(np.concatenate([x, column], -1))[..., :-1]


@pytest.mark.parametrize("mask_type", [np.float32, np.float16])
@pytest.mark.parametrize(("n_head", "max_bias"), [(4, 0.0), (4, 8.0), (6, 8.0)])
def test_soft_max_with_mask_and_alibi(mask_type, n_head, max_bias):
    x = normal(2, n_head, 3, 10)
    mask = (causal_mask(2, 3, 10) - np.arange(10, dtype=np.float32)[::-1] * (max_bias > 0)).astype(mask_type)
    out = run(lambda c, a, m: ops.soft_max(c, a, m, 0.3, max_bias), x, mask)
    slopes = alibi_slopes(n_head, max_bias)[:, None, None]
    with np.errstate(invalid="ignore"):
        expect = softmax(0.3 * x.astype(np.float64) + slopes * mask)
    assert np.allclose(out, expect, atol=1e-6)
    assert np.allclose(out.sum(-1), 1, atol=1e-6)


def test_soft_max_takes_a_mask_with_rows_to_spare():
    x, mask = normal(2, 3, 8), causal_mask(1, 5, 8)[0]
    out = run(lambda c, a, m: ops.soft_max(c, a, m, 1.0), x, mask)
    assert np.allclose(out[0], softmax(x + mask[:, :3].astype(np.float64)), atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_soft_max_without_a_mask(scale):
    x = normal(2, 3, 10)
    assert np.allclose(run(lambda c, a: ops.soft_max(c, a, scale=scale), x)[0], softmax(scale * x), atol=1e-6)


def test_soft_max_with_sinks():
    x, mask, sinks = normal(2, 4, 3, 10), causal_mask(2, 3, 10), 2 * normal(4)
    out = run(lambda c, a, m, s: ops.soft_max(c, a, m, 0.3, sinks=s), x, mask, sinks)
    assert np.allclose(out, softmax(0.3 * x.astype(np.float64) + mask, sinks), atol=1e-6)


def test_soft_max_with_sinks_of_a_row_that_sees_nothing():
    out = run(
        lambda c, a, m, s: ops.soft_max(c, a, m, 1.0, sinks=s),
        normal(2, 1, 8),
        np.full((1, 8), -np.inf, np.float32),
        normal(2),
    )
    assert not out.any()


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    scale: float,
    *,
    cap: float = 0.0,
    bias: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return (S, n, H, Dv) from q (S, H, n, Dk), k (S, Hk, n_kv, Dk), v (S, Hk, n_kv, Dv), mask (S, 1, n, n_kv)."""
    n_rep = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), n_rep, axis=1) for x in (k, v))
    scores = scale * q.astype(np.float64) @ k.swapaxes(-1, -2)
    if cap:
        scores = cap * np.tanh(scores / cap)
    scores = scores + alibi_slopes(q.shape[1], bias)[:, None, None] * mask
    return (softmax(scores, sinks) @ v).transpose(0, 2, 1, 3)


def stored(x: np.ndarray, dtype: DType) -> np.ndarray:
    raw = from_float(dtype, x).reshape(*x.shape[:-1], -1)
    return gguf.dequantize(raw, gguf.GGMLQuantizationType(int(dtype)))


CACHE_TYPES = [
    *(DType.F16, DType.BF16, DType.F32),
    *(DType.Q8_0, DType.Q5_1, DType.Q5_0, DType.Q4_1, DType.Q4_0, DType.IQ4_NL),
]


@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=lambda t: t.label)
@pytest.mark.parametrize(("n_stream", "n", "n_kv"), [(1, 1, 40), (1, 5, 40), (2, 3, 32), (1, 1, 600)])
def test_flash_attention(dtype, n_stream, n, n_kv):
    q = normal(n_stream, 6, n, 64)
    k, v = normal(n_stream, 2, n_kv, 64), normal(n_stream, 2, n_kv, 32)
    mask = causal_mask(n_stream, n, n_kv)
    out = run(
        lambda c, q, k, v, m: ops.flash_attn(c, q, k, v, m, scale=0.125),
        q,
        (k, dtype),
        (v, dtype),
        mask.astype(np.float16),
    )
    # q is rounded to what K is multiplied in (8 bits a block, or 16-bit floats), sums of f16 V are f16
    assert nmse(out, attention(q, stored(k, dtype), stored(v, dtype), mask, 0.125)) < 5e-4


@pytest.mark.parametrize(("cap", "bias"), [(5.0, 0.0), (0.0, 8.0), (5.0, 8.0)])
def test_flash_attention_with_a_cap_and_alibi(cap, bias):
    q, k, v = normal(1, 4, 3, 64), normal(1, 4, 24, 64), normal(1, 4, 24, 64)
    mask = causal_mask(1, 3, 24) - np.arange(24, dtype=np.float32)[::-1] * (bias > 0)

    def build(c: Arena, *operands: Tensor) -> Tensor:
        return ops.flash_attn(c, *operands, scale=0.125, max_bias=bias, logit_softcap=cap)

    halves = k.astype(np.float16), v.astype(np.float16)
    out = run(build, q, *halves, mask.astype(np.float16))
    assert nmse(out, attention(q, *halves, mask, 0.125, cap=cap, bias=bias)) < 1e-5


@pytest.mark.parametrize(("n", "n_kv"), [(1, 24), (3, 24), (70, 96)])
def test_flash_attention_with_sinks(n, n_kv):
    q, k, v = normal(2, 4, n, 64), normal(2, 2, n_kv, 64), normal(2, 2, n_kv, 64)
    mask, sinks = causal_mask(2, n, n_kv), 2 * normal(4)
    halves = k.astype(np.float16), v.astype(np.float16)
    out = run(
        lambda c, q, k, v, m, s: ops.flash_attn(c, q, k, v, m, scale=0.125, sinks=s),
        *(q, *halves, mask.astype(np.float16), sinks),
    )
    assert nmse(out, attention(q, *halves, mask, 0.125, sinks=sinks)) < 1e-5


def test_flash_attention_over_views_of_a_cache():
    q, k, v = normal(1, 4, 2, 32), normal(1, 24, 2, 32), normal(1, 24, 2, 32)  # cells outside heads

    def build(c: Arena, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        k, v = (ops.permute(c, x, 0, 2, 1, 3) for x in (k, v))
        return ops.flash_attn(c, q, k, v, m, scale=0.2)

    halves = k.astype(np.float16), v.astype(np.float16)
    mask = causal_mask(1, 2, 24)
    expect = attention(q, *(x.swapaxes(1, 2) for x in halves), mask, 0.2)
    assert nmse(run(build, q, *halves, mask.astype(np.float16)), expect) < 1e-5


# refusals


@pytest.fixture
def arena() -> Arena:
    return Arena(128)


@pytest.mark.parametrize("mask", [(9, 3), (10, 2), (10, 3, 3), (10, 3, 1, 2)])
def test_soft_max_refuses_masks_that_do_not_fit(arena, mask):
    with pytest.raises(TensorError, match="mask"):
        ops.soft_max(arena, arena.tensor(DType.F32, (10, 3, 4)), arena.tensor(DType.F32, mask), 1.0)


def test_soft_max_refuses_types_and_layouts(arena):
    x, mask = arena.tensor(DType.F32, (10, 10)), arena.tensor(DType.F32, (10, 10))
    with pytest.raises(TensorError, match="wants f32"):
        ops.soft_max(arena, arena.tensor(DType.F16, (10, 10)), mask, 1.0)
    with pytest.raises(TensorError, match="wants f32 or f16"):
        ops.soft_max(arena, x, arena.tensor(DType.BF16, (10, 10)), 1.0)
    for pair in ((ops.transpose(arena, x), mask), (x, ops.transpose(arena, mask))):
        with pytest.raises(TensorError, match=r"mask does not fit|contiguous"):
            ops.soft_max(arena, *pair, 1.0)


def test_soft_max_with_alibi_needs_a_mask(arena):
    with pytest.raises(TensorError, match=r"max_bias=8\.0 needs a mask"):
        ops.soft_max(arena, arena.tensor(DType.F32, (8, 2)), None, 1.0, 8.0)


@pytest.mark.parametrize("ne", [(3,), (5,), (1,), (4, 2)])
def test_sinks_that_do_not_fit(arena, ne):
    sinks = arena.tensor(DType.F32, ne)
    with pytest.raises(TensorError, match="soft_max: wants one sink a head"):
        ops.soft_max(arena, arena.tensor(DType.F32, (10, 3, 4)), sinks=sinks)
    kinds = {"q": DType.F32, "k": DType.F16, "v": DType.F16, "mask": DType.F16}
    operands = [arena.tensor(kinds[name], ne) for name, ne in FITTING.items()]
    with pytest.raises(TensorError, match="flash_attn: wants one sink a head"):
        ops.flash_attn(arena, *operands, scale=1.0, sinks=sinks)


def test_sinks_of_a_type_or_layout_without_a_kernel(arena):
    x, table = arena.tensor(DType.F32, (10, 3, 4)), arena.tensor(DType.F32, (2, 4))
    with pytest.raises(TensorError, match="soft_max: wants f32"):
        ops.soft_max(arena, x, sinks=arena.tensor(DType.F16, (4,)))
    column = ops.view(arena, table, (1, 4, 1, 1), table.nb[1:])
    with pytest.raises(TensorError, match="one sink a head"):
        ops.soft_max(arena, x, sinks=ops.transpose(arena, column))


FITTING = {"q": (64, 3, 4), "k": (64, 10, 2), "v": (32, 10, 2), "mask": (10, 3)}


@pytest.mark.parametrize(
    "change",
    [
        {"q": (32, 3, 4)},
        {"q": (64, 3, 3)},
        {"q": (64, 3, 4, 2)},
        {"q": (64, 4, 4)},
        {"k": (64, 11, 2)},
        {"k": (64, 10, 4)},
        {"k": (64, 10, 2, 2)},
        {"v": (32, 9, 2)},
        {"v": (32, 10, 1)},
        {"mask": (9, 3)},
        {"mask": (10, 2)},
        {"mask": (10, 3, 3)},
        {"mask": (10, 3, 1, 2)},
    ],
    ids=str,
)
def test_flash_attention_refuses_shapes_that_do_not_fit(arena, change):
    kinds = {"q": DType.F32, "k": DType.F16, "v": DType.F16, "mask": DType.F16}
    tensors = [arena.tensor(kinds[name], ne) for name, ne in (FITTING | change).items()]
    with pytest.raises(TensorError, match="flash_attn: shapes"):
        ops.flash_attn(arena, *tensors, scale=1.0)


@pytest.mark.parametrize(
    ("name", "dtype"), [("q", DType.F16), ("mask", DType.F32), ("k", DType.I32), ("k", DType.Q4_K), ("v", DType.F64)]
)
def test_flash_attention_refuses_types(arena, name, dtype):
    kinds = {"q": DType.F32, "k": DType.F16, "v": DType.F16, "mask": DType.F16} | {name: dtype}
    wide = FITTING | {"q": (256, 3, 4), "k": (256, 10, 2)}
    with pytest.raises(TensorError, match="flash_attn: wants"):
        ops.flash_attn(arena, *(arena.tensor(kinds[n], ne) for n, ne in wide.items()), scale=1.0)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_flash_attention_refuses_rows_that_are_not_dense(arena, name):
    kinds = {"q": DType.F32, "k": DType.F16, "v": DType.F16, "mask": DType.F16}
    tensors = {n: arena.tensor(kinds[n], ne) for n, ne in FITTING.items()}
    n0, n1, *rest = FITTING[name]
    tensors[name] = ops.transpose(arena, arena.tensor(kinds[name], (n1, n0, *rest)))
    with pytest.raises(TensorError, match="layouts"):
        ops.flash_attn(arena, *tensors.values(), scale=1.0)
