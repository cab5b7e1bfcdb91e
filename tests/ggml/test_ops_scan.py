"""Recurrences against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graph import Bench
from support.naive_scan import naive_conv, naive_delta_net, naive_ssm, naive_wkv7

from pykv.errors import TensorError
from pykv.ggml import Arena, DType, Tensor, ops

RNG = np.random.default_rng(17)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def unit(*shape: int) -> np.ndarray:
    x = normal(*shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def run_both(build, **arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two results of an operation on named arrays."""
    bench = Bench()
    out, states = build(bench.nodes, **{name: bench.put(array) for name, array in arrays.items()})
    with bench.computed(out, states):
        return out.numpy(), states.numpy()


def check_states(states: np.ndarray, expect: np.ndarray, n_states: int) -> None:
    """Compare (1, n, n_seqs, -1) with the states after all tokens (n_tokens, n_seqs, ...), newest first."""
    n_tokens, n_seqs = expect.shape[:2]
    n = min(n_tokens, n_states)
    assert states.shape[1:3] == (n, n_seqs)
    assert np.allclose(states[0], expect[::-1][:n].reshape(n, n_seqs, -1), **CLOSE)


@pytest.mark.parametrize(("n_conv", "n_tokens", "n_seqs"), [(4, 1, 1), (4, 7, 1), (3, 5, 2), (1, 3, 1), (2, 1, 3)])
def test_ssm_conv(n_conv, n_tokens, n_seqs):
    a, kernel = normal(n_seqs, 6, n_conv - 1 + n_tokens), normal(6, n_conv)
    bench = Bench()
    out = ops.ssm_conv(bench.nodes, bench.put(a), bench.put(kernel))
    with bench.computed(out):
        assert np.allclose(out.numpy()[0], naive_conv(a, kernel), **CLOSE)


SSM_FORMS = {
    "mamba": {"n_head": 12, "dim": 1, "d_state": 16, "n_group": 1, "n_decay": 16},
    "mamba, heads": {"n_head": 4, "dim": 3, "d_state": 8, "n_group": 2, "n_decay": 8},
    "mamba2": {"n_head": 4, "dim": 8, "d_state": 16, "n_group": 1, "n_decay": 1},
    "mamba2, groups": {"n_head": 6, "dim": 4, "d_state": 128, "n_group": 3, "n_decay": 1},
    "mamba2, an odd state": {"n_head": 2, "dim": 3, "d_state": 70, "n_group": 2, "n_decay": 1},
}


def ssm_arrays(form: str, n_tokens: int, n_seqs: int, n_rows: int) -> dict[str, np.ndarray]:
    f = SSM_FORMS[form]
    return {
        "states": normal(n_rows, f["n_head"], f["dim"], f["d_state"]),
        "index": RNG.permutation(n_rows)[:n_seqs].astype(np.int32),
        "x": normal(n_seqs, n_tokens, f["n_head"], f["dim"]),
        "dt": normal(n_seqs, n_tokens, f["n_head"]),
        "a": -np.exp(normal(f["n_head"], f["n_decay"])),
        "b": normal(n_seqs, n_tokens, f["n_group"], f["d_state"]),
        "c": normal(n_seqs, n_tokens, f["n_group"], f["d_state"]),
    }


@pytest.mark.parametrize(("n_tokens", "n_seqs"), [(1, 1), (5, 1), (3, 2)])
@pytest.mark.parametrize("form", SSM_FORMS)
def test_ssm_scan(form, n_tokens, n_seqs):
    arrays = ssm_arrays(form, n_tokens, n_seqs, n_rows=4)
    y, states = run_both(ops.ssm_scan, **arrays)
    start = arrays.pop("states")[arrays.pop("index")]
    expect, all_states = naive_ssm(start, **arrays)
    assert np.allclose(y, expect, **CLOSE)
    check_states(states, all_states, 1)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 6])
def test_ssm_scan_keeps_the_last_states(n_tokens):
    arrays = ssm_arrays("mamba2, groups", n_tokens, 2, n_rows=3)
    _, states = run_both(lambda arena, **o: ops.ssm_scan(arena, **o, n_states=3), **arrays)
    start = arrays.pop("states")[arrays.pop("index")]
    check_states(states, naive_ssm(start, **arrays)[1], 3)


def test_ssm_scan_over_parts_of_one_projection():
    arrays = ssm_arrays("mamba2, groups", 3, 2, n_rows=2)
    parts = [arrays.pop(name) for name in "xbc"]
    whole = np.concatenate([part.reshape(2, 3, -1) for part in parts], axis=-1)

    def build(arena: Arena, whole: Tensor, **operands: Tensor) -> tuple[Tensor, Tensor]:
        offset, views = 0, {}
        for name, part in zip("xbc", parts, strict=True):
            ne = tuple(reversed(part.shape))
            views[name] = ops.view(arena, whole, ne, (4 * ne[0], whole.nb[1], whole.nb[2]), offset)
            offset += 4 * ne[0] * ne[1]
        return ops.ssm_scan(arena, **operands, **views)

    y, _ = run_both(build, whole=whole, **arrays)
    start = arrays.pop("states")[arrays.pop("index")]
    expect, _ = naive_ssm(start, x=parts[0], b=parts[1], c=parts[2], **arrays)
    assert np.allclose(y, expect, **CLOSE)


@pytest.mark.parametrize(("n_tokens", "n_seqs", "n_head"), [(1, 1, 2), (4, 1, 1), (3, 2, 3)])
def test_rwkv_wkv7(n_tokens, n_seqs, n_head):
    shape = (n_seqs, n_tokens, n_head, 64)
    kk = unit(*shape)
    operands = {name: normal(*shape) for name in "rkv"}
    operands |= {"w": np.exp(-0.6 * RNG.random(shape)).astype(np.float32), "a": -kk}
    operands["b"] = kk * RNG.random(shape).astype(np.float32)
    state = normal(n_seqs, n_head, 64, 64)
    flat = {name: x.reshape(-1, n_head, 64) for name, x in operands.items()}
    out, states = run_both(ops.rwkv_wkv7, state=state.reshape(n_seqs, -1), **flat)
    expect, all_states = naive_wkv7(state, **operands)
    assert np.allclose(out.reshape(shape), expect, rtol=1e-4, atol=1e-4)
    assert np.allclose(states.reshape(state.shape), all_states[-1], rtol=1e-4, atol=1e-4)


def delta_arrays(n_tokens: int, n_seqs: int, *, n_head: int, n_head_k: int, head: int, n_gate: int):
    lead = n_seqs, n_tokens
    return {
        "state": normal(n_seqs, n_head, head, head),
        "q": unit(*lead, n_head_k, head),
        "k": unit(*lead, n_head_k, head),
        "v": normal(*lead, n_head, head),
        "gate": -RNG.random((*lead, n_head, n_gate)).astype(np.float32),
        "beta": RNG.random((*lead, n_head, 1)).astype(np.float32),
    }


@pytest.mark.parametrize("n_states", [1, 2, 4])
@pytest.mark.parametrize(("n_tokens", "n_seqs"), [(1, 1), (3, 2), (6, 1)])
@pytest.mark.parametrize(("n_head", "n_head_k", "head", "n_gate"), [(4, 2, 32, 1), (2, 2, 24, 24), (3, 1, 16, 1)])
def test_gated_delta_net(n_tokens, n_seqs, n_head, n_head_k, head, n_gate, n_states):
    arrays = delta_arrays(n_tokens, n_seqs, n_head=n_head, n_head_k=n_head_k, head=head, n_gate=n_gate)
    out, states = run_both(lambda arena, **o: ops.gated_delta_net(arena, **o, n_states=n_states), **arrays)
    expect, all_states = naive_delta_net(**arrays)
    assert np.allclose(out, expect, **CLOSE)
    check_states(states, all_states, n_states)


# refusals

OPERANDS = {
    "ssm_scan": {
        "states": (16, 4, 6, 5),
        "index": (2,),
        "x": (4, 6, 3, 2),
        "dt": (6, 3, 2),
        "a": (1, 6),
        "b": (16, 2, 3, 2),
        "c": (16, 2, 3, 2),
    },
    "rwkv_wkv7": {"state": (64 * 64 * 2, 3), **dict.fromkeys("rwkvab", (64, 2, 6))},
    "gated_delta_net": {
        "state": (16, 16, 4, 2),
        **dict.fromkeys("qk", (16, 2, 3, 2)),
        "v": (16, 4, 3, 2),
        "gate": (1, 4, 3, 2),
        "beta": (1, 4, 3, 2),
    },
}


@pytest.fixture
def arena() -> Arena:
    return Arena(256)


def made(arena: Arena, op: str, **changed: Tensor | tuple[int, ...]) -> dict[str, Tensor]:
    kinds = {"index": DType.I32}
    return {
        name: ne if isinstance(ne, Tensor) else arena.tensor(kinds.get(name, DType.F32), ne, name)
        for name, ne in (OPERANDS[op] | changed).items()
    }


@pytest.mark.parametrize("op", OPERANDS)
def test_operands_that_fit(arena, op):
    out, states = getattr(ops, op)(arena, **made(arena, op))
    assert out.ne == {"ssm_scan": (4, 6, 3, 2), "rwkv_wkv7": (64, 2, 6, 1), "gated_delta_net": (16, 4, 3, 2)}[op]
    assert (
        states.ne
        == {
            "ssm_scan": (16 * 4 * 6, 2, 1, 1),
            "rwkv_wkv7": (64 * 64 * 2, 3, 1, 1),
            "gated_delta_net": (16 * 16 * 4, 2, 1, 1),
        }[op]
    )


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in OPERANDS.items() for name in names])
def test_each_operand_must_have_its_shape_and_type(arena, op, name):
    ne = (*OPERANDS[op][name], 1, 1, 1)[:4]
    for dim in range(4):
        if (op, name, dim) == ("ssm_scan", "states", 3):  # rows to spare
            continue
        wrong = tuple(n + (i == dim) for i, n in enumerate(ne))
        with pytest.raises(TensorError, match=f"{op}: shapes"):
            getattr(ops, op)(arena, **made(arena, op, **{name: wrong}))
    for kind in (DType.F16, DType.I64):
        with pytest.raises(TensorError, match=f"{op}: wants"):
            getattr(ops, op)(arena, **made(arena, op, **{name: arena.tensor(kind, ne)}))


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in OPERANDS.items() for name in names])
def test_each_operand_must_have_dense_rows(arena, op, name):
    n0, n1, *rest = (*OPERANDS[op][name], 1, 1, 1)[:4]
    if (n0, n1) == (1, 1) or name in ("index", "gate", "beta", "a"):
        spread = arena.tensor(DType.I32 if name == "index" else DType.F32, (2, n0, n1, *rest[:1]))
        wrong = ops.view(arena, spread, (1, n0, n1, rest[0]), spread.nb[1:])
        wrong = ops.permute(arena, wrong, 3, 0, 1, 2)
    else:
        wrong = ops.transpose(arena, arena.tensor(DType.F32, (n1, n0, *rest)))
    with pytest.raises(TensorError, match=f"{op}: shapes"):
        getattr(ops, op)(arena, **made(arena, op, **{name: wrong}))


def test_heads_of_an_unfit_size_or_number(arena):
    with pytest.raises(TensorError, match="multiples of 64"):
        ops.rwkv_wkv7(arena, **made(arena, "rwkv_wkv7", state=(32 * 32 * 2, 3), **dict.fromkeys("rwkvab", (32, 2, 6))))
    with pytest.raises(TensorError, match="shapes"):
        ops.ssm_scan(arena, **made(arena, "ssm_scan", b=(16, 4, 3, 2), c=(16, 4, 3, 2)))
    with pytest.raises(TensorError, match="shapes"):
        ops.gated_delta_net(arena, **made(arena, "gated_delta_net", q=(16, 3, 3, 2), k=(16, 3, 3, 2)))


@pytest.mark.parametrize("n_states", [0, -1, 2**31])
def test_a_number_of_states_that_cannot_be(arena, n_states):
    for op in ("ssm_scan", "gated_delta_net"):
        with pytest.raises(TensorError, match=f"n_states={n_states}"):
            getattr(ops, op)(arena, **made(arena, op), n_states=n_states)


def test_mamba_keeps_no_earlier_states(arena):
    with pytest.raises(TensorError, match="n_states=2 must be 1 to 1"):
        ops.ssm_scan(arena, **made(arena, "ssm_scan", a=(16, 6)), n_states=2)


def test_a_state_that_does_not_exist_is_named():
    arrays = ssm_arrays("mamba", 2, 1, n_rows=3) | {"index": np.array([3], np.int32)}
    with pytest.raises(TensorError, match="3 names no row; they are 0 to 2"):
        run_both(ops.ssm_scan, **arrays)
    arena = Arena(16)
    computed = ops.cont(arena, arena.tensor(DType.I32, (2,)))
    with pytest.raises(TensorError, match="computed"):
        ops.ssm_scan(arena, **made(arena, "ssm_scan", index=computed))


@pytest.mark.parametrize(
    ("a", "kernel"), [((2, 5), (3, 5)), ((5, 5), (3, 4)), ((5, 5, 1, 2), (3, 5)), ((5, 5), (3, 5, 2))], ids=str
)
def test_ssm_conv_refuses(arena, a, kernel):
    with pytest.raises(TensorError, match="ssm_conv: shapes"):
        ops.ssm_conv(arena, arena.tensor(DType.F32, a), arena.tensor(DType.F32, kernel))


def test_ssm_conv_refuses_types_and_layouts(arena):
    a, kernel = arena.tensor(DType.F32, (5, 5)), arena.tensor(DType.F32, (5, 5))
    for pair in ((ops.transpose(arena, a), kernel), (a, ops.transpose(arena, kernel))):
        with pytest.raises(TensorError, match="layouts"):
            ops.ssm_conv(arena, *pair)
    for pair in ((arena.tensor(DType.F16, (5, 5)), kernel), (a, arena.tensor(DType.F16, (5, 5)))):
        with pytest.raises(TensorError, match="wants f32"):
            ops.ssm_conv(arena, *pair)
