"""Recurrences over tokens in plain numpy and float64, one token at a time: slow and obvious.

Mamba: Gu and Dao 2023; Mamba-2: Dao and Gu 2024; RWKV-7: Peng et al. 2025; gated delta rule: Yang, Kautz and
Hatamizadeh 2024. Each returns the results, and the states after every token: (n_tokens, n_seqs, ...).
"""

from __future__ import annotations

import numpy as np


def naive_conv(a: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Return each channel's convolution over time, (n_seqs, n_tokens, n_channel).

    a (n_seqs, n_channel, n_conv - 1 + n_tokens), kernel (n_channel, n_conv).
    """
    n_conv = kernel.shape[1]
    n_tokens = a.shape[2] - n_conv + 1
    out = [(a[:, :, t : t + n_conv].astype(np.float64) * kernel).sum(-1) for t in range(n_tokens)]
    return np.stack(out, axis=1)


def naive_ssm(
    state: np.ndarray, x: np.ndarray, dt: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return y, as `x`, and the states of Mamba, or of Mamba-2, whose `a` has one number a head.

    state (n_seqs, n_head, dim, d_state), x (n_seqs, n_tokens, n_head, dim), dt (n_seqs, n_tokens, n_head),
    a (n_head, d_state or 1), b, c (n_seqs, n_tokens, n_group, d_state).
    """
    n_per_group = x.shape[2] // b.shape[2]
    b, c = (np.repeat(one.astype(np.float64), n_per_group, axis=2) for one in (b, c))
    step = np.logaddexp(0, dt.astype(np.float64))
    state, ys, states = state.astype(np.float64), [], []
    for t in range(x.shape[1]):
        h = step[:, t, :, None, None]
        state = state * np.exp(h * a[:, None]) + h * x[:, t, :, :, None] * b[:, t, :, None]
        ys.append((state * c[:, t, :, None]).sum(-1))
        states.append(state)
    return np.stack(ys, axis=1), np.stack(states)


def naive_wkv7(state: np.ndarray, **operands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the result, as `r`, and the states of RWKV-7's time mixing.

    state (n_seqs, n_head, head, head), its rows belong to v; r, w, k, v, a, b (n_seqs, n_tokens, n_head, head).
    """
    r, w, k, v, a, b = (operands[name].astype(np.float64) for name in "rwkvab")
    state, out, states = state.astype(np.float64), [], []
    for t in range(r.shape[1]):
        removed = np.einsum("shij,shj->shi", state, a[:, t])
        state = (
            state * w[:, t, :, None] + v[:, t, :, :, None] * k[:, t, :, None] + removed[..., None] * b[:, t, :, None]
        )
        out.append(np.einsum("shij,shj->shi", state, r[:, t]))
        states.append(state)
    return np.stack(out, axis=1), np.stack(states)


def naive_delta_net(state: np.ndarray, **operands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the result, as `v`, and the states of the gated delta rule.

    state (n_seqs, n_head, head, head), its rows belong to v; q, k (n_seqs, n_tokens, n_head_k, head), head i of v goes
    with head i mod n_head_k; v (n_seqs, n_tokens, n_head, head), gate (n_seqs, n_tokens, n_head, 1 or head), beta
    (n_seqs, n_tokens, n_head, 1).
    """
    q, k, v, gate, beta = (operands[name].astype(np.float64) for name in ("q", "k", "v", "gate", "beta"))
    n_head, head = v.shape[2:]
    q, k = (np.tile(one, (1, 1, n_head // one.shape[2], 1)) for one in (q, k))
    state, out, states = state.astype(np.float64), [], []
    for t in range(v.shape[1]):
        state = state * np.exp(gate[:, t, :, None])
        error = v[:, t] - np.einsum("shij,shj->shi", state, k[:, t])
        state = state + (beta[:, t] * error)[..., None] * k[:, t, :, None]
        out.append(np.einsum("shij,shj->shi", state, q[:, t]) / np.sqrt(head))
        states.append(state)
    return np.stack(out, axis=1), np.stack(states)
