"""Recurrences over the tokens of each sequence: a state goes in, results and the newest states come out; all f32.

Sequences of one batch have as many tokens each. An operation with `n_states` also returns the states before the newest
token, before the one before it, and so on: as many as there are tokens, at most `n_states` together with the newest.
"""

from __future__ import annotations

from math import prod

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require, require_dtype, require_index
from pykv.ggml.ops.shape import view
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

WKV_LANES = 64
"""What heads of `rwkv_wkv7` are multiples of: ggml's kernel takes whole steps of vectors, the widest are this wide."""


def ssm_conv(arena: Arena, a: Tensor, kernel: Tensor) -> Tensor:
    """Return the convolution of each channel over time.

    `a` [n_conv - 1 + n_tokens, n_channel, n_seqs] contiguous, `kernel` [n_conv, n_channel]
    → [n_channel, n_tokens, n_seqs].
    """
    _require_f32("ssm_conv", a, kernel)
    ok = a.ne[1] == kernel.ne[1] and a.ne[3] == kernel.ne[2] == kernel.ne[3] == 1 and a.ne[0] >= kernel.ne[0]
    require(ok and a.is_contiguous and kernel.is_contiguous, "ssm_conv", "shapes or layouts do not fit", a, kernel)
    return arena.node(lib.ggml_ssm_conv, (a, kernel))


def ssm_scan(
    arena: Arena,
    states: Tensor,
    index: Tensor,
    *,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    n_states: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return y and the new states of a selective state space: Mamba if `a` has a row of decays a head, Mamba-2 if one.

    With t = softplus(dt): state = state * exp(t * a) + b * (t * x), y = c · state.

    `states` [d_state, dim, n_head, n_rows] contiguous, `index` [n_seqs] i32 names those to begin with,
    `x` [dim, n_head, n_tokens, n_seqs] with dense heads, `dt` [n_head, n_tokens, n_seqs] contiguous,
    `a` [d_state or 1, n_head] contiguous, `b`, `c` [d_state, n_group, n_tokens, n_seqs] with dense groups, each for
    n_head / n_group heads in a row → y [dim, n_head, n_tokens, n_seqs] and the states
    [d_state * dim * n_head, n_seqs, n], newest first. Mamba has no `n_states` beyond 1. Three nodes, two are views.
    """
    op = "ssm_scan"
    _require_f32(op, states, x, dt, a, b, c)
    require_dtype(op, index, DType.I32)
    d_state, dim, n_head, n_rows = states.ne
    _, _, n_tokens, n_seqs = x.ne
    ok = (
        x.ne[:2] == (dim, n_head)
        and dt.ne == (n_head, n_tokens, n_seqs, 1)
        and index.ne == (n_seqs, 1, 1, 1)
        and a.ne in ((1, n_head, 1, 1), (d_state, n_head, 1, 1))
        and b.ne == c.ne == (d_state, b.ne[1], n_tokens, n_seqs)
        and n_head % b.ne[1] == 0
        and all(t.is_contiguous for t in (states, dt, a, index))
        and all(t.has_dense_rows and t.nb[1] == t.nb[0] * t.ne[0] for t in (x, b, c))
    )
    require(ok, op, "shapes or layouts do not fit", states, index, x, dt, a, b, c)
    _require_n_states(op, n_states, a.ne[0] == 1, a)
    require_index(op, index, n_rows)
    DType.F32.check_size((prod(x.ne) + n_states * prod(states.ne[:3]) * n_seqs,))
    out = arena.node(lib.ggml_ssm_scan, (states, x, dt, a, b, c, index), n_states)
    arena.note_index(index, n_rows)
    return _parts(arena, out, x.ne, (d_state * dim * n_head, n_seqs, min(n_tokens, n_states)))


def rwkv_wkv7(
    arena: Arena, state: Tensor, *, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result and the new states of RWKV-7's time mixing.

    For each head: state = state * w + v ⊗ k + (state · a) ⊗ b, result = state · r; rows of the state belong to `v`.

    `state` [head * head * n_head, n_seqs]; all others [head, n_head, n_tokens * n_seqs], sequence by sequence; all
    contiguous, `head` a multiple of 64 → result [head, n_head, n_tokens * n_seqs] and states [..., n_seqs]. Three
    nodes, two are views.
    """
    op, operands = "rwkv_wkv7", (r, w, k, v, a, b)
    _require_f32(op, state, *operands)
    head, n_head, n, _ = k.ne
    n_seqs = state.ne[1]
    ok = (
        all(t.ne == (head, n_head, n, 1) for t in operands)
        and state.ne == (head * head * n_head, n_seqs, 1, 1)
        and n % n_seqs == 0
        and all(t.is_contiguous for t in (state, *operands))
    )
    require(ok, op, "shapes or layouts do not fit", state, *operands)
    require(head % WKV_LANES == 0, op, f"heads must be multiples of {WKV_LANES}", k)
    DType.F32.check_size((head * n_head, n + head * n_seqs))
    out = arena.node(lib.ggml_rwkv_wkv7, (*operands, state))
    return _parts(arena, out, k.ne, state.ne[:3])


def gated_delta_net(
    arena: Arena,
    state: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    n_states: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the result and the new states of a gated delta rule (Yang et al. 2024).

    For each head: state = exp(gate) * state, state = state + beta * (v - state · k) ⊗ k, result = state · q / √head;
    rows of the state belong to `v`.

    `state` [head, head, H, n_seqs], `q`, `k` [head, Hk, n_tokens, n_seqs], `v` [head, H, n_tokens, n_seqs], with dense
    rows; head i of `v` goes with head i mod Hk of `q` and `k`. `gate` [1 or head, H, n_tokens, n_seqs], `beta`
    [1, H, n_tokens, n_seqs]; these and `state` contiguous → result [head, H, n_tokens, n_seqs] and states
    [head * head * H, n_seqs, n], newest first. Three nodes, two are views.
    """
    op, operands = "gated_delta_net", (q, k, v, gate, beta)
    _require_f32(op, state, *operands)
    head, n_head, n_tokens, n_seqs = v.ne
    ok = (
        state.ne == (head, head, n_head, n_seqs)
        and q.ne == k.ne == (head, k.ne[1], n_tokens, n_seqs)
        and n_head % k.ne[1] == 0
        and gate.ne in ((1, *v.ne[1:]), v.ne)
        and beta.ne == (1, *v.ne[1:])
        and all(t.has_dense_rows for t in (q, k, v))
        and all(t.is_contiguous for t in (gate, beta, state))
    )
    require(ok, op, "shapes or layouts do not fit", state, *operands)
    _require_n_states(op, n_states, True, state)
    n_state = head * head * n_head
    DType.F32.check_size((head * n_head, n_tokens * n_seqs + n_states * head * n_seqs))
    out = arena.node(lib.ggml_gated_delta_net, (*operands, state), n_states)
    return _parts(arena, out, v.ne, (n_state, n_seqs, min(n_tokens, n_states)))


def _require_f32(op: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        require_dtype(op, tensor, DType.F32)


def _require_n_states(op: str, n_states: int, can_be_many: bool, a: Tensor) -> None:
    most = 2**31 - 1 if can_be_many else 1
    require(1 <= n_states <= most, op, f"n_states={n_states} must be 1 to {most}", a)


def _parts(
    arena: Arena, out: Tensor, result: tuple[int, int, int, int], states: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Return the result that ggml wrote first, and the states behind it."""
    first = view(arena, out, result, _strides(result))
    ne = (*states, 1)
    return first, view(arena, out, ne, _strides(ne), prod(result) * DType.F32.type_size)


def _strides(ne: tuple[int, int, int, int]) -> tuple[int, int, int]:
    row = ne[0] * DType.F32.type_size
    return row, row * ne[1], row * ne[1] * ne[2]
