"""Attention over stored keys and values in plain numpy, one query at a time: slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F64Array = NDArray[np.float64]


def alibi_slope(head: int, n_head: int, max_bias: float) -> float:
    """Return the slope of one head as the ALiBi paper has it, also where the heads are no power of two."""
    if max_bias == 0:
        return 1.0
    whole = 2 ** math.floor(math.log2(n_head))
    if head < whole:
        return float(2 ** (-max_bias / whole * (head + 1)))
    return float(2 ** (-max_bias / 2 / whole * (2 * (head - whole) + 1)))


@dataclass
class NaiveKV:
    """Every token ever stored as one row: its sequences, its position, its key and value.

    Attributes
    ----------
    hidden : (key position, query position) → whether a window hides the key.
    """

    scale: float
    max_bias: float = 0.0
    softcap: float = 0.0
    hidden: Callable[[int, int], bool] = lambda p0, p1: False
    rows: list[tuple[frozenset[int], int, F64Array, F64Array]] = field(default_factory=list)

    def store(self, seq_ids: int | Iterable[int], pos: int, k: F64Array, v: F64Array) -> None:
        """Add one token: `k` (n_head_kv, Dk), `v` (n_head_kv, Dv)."""
        ids = {seq_ids} if isinstance(seq_ids, int) else seq_ids
        self.rows.append((frozenset(ids), pos, np.asarray(k, np.float64), np.asarray(v, np.float64)))

    def attend(self, seq_id: int, pos: int, q: F64Array) -> F64Array:
        """Return (n_head, Dv) of one query (n_head, Dk)."""
        seen = [r for r in self.rows if seq_id in r[0] and r[1] <= pos and not self.hidden(r[1], pos)]
        out = []
        for head, one in enumerate(np.asarray(q, np.float64)):
            kv_head = head // (len(q) // len(seen[0][2]))
            slope = alibi_slope(head, len(q), self.max_bias)
            scores = []
            for _, p0, k, _ in seen:
                score = float(one @ k[kv_head]) * self.scale
                if self.softcap:
                    score = self.softcap * math.tanh(score / self.softcap)
                scores.append(score - (slope * abs(pos - p0) if self.max_bias else 0.0))
            weights = np.exp(np.array(scores) - max(scores))
            values = np.array([v[kv_head] for _, _, _, v in seen])
            out.append(weights @ values / weights.sum())
        return np.array(out)


def dense_attention(
    q: NDArray[np.floating],
    k: NDArray[np.floating],
    v: NDArray[np.floating],
    mask: NDArray[np.floating] | None,
    *,
    scale: float,
    max_bias: float = 0.0,
    softcap: float = 0.0,
    sinks: NDArray[np.floating] | None = None,
) -> F64Array:
    """Return (S, n, H, Dv) from q (S, n, H, Dk), k (S, n_kv, Hk, Dk), v (S, n_kv, Hk, Dv), mask (S, n, n_kv).

    A query that sees no cell gets zeros; what lies in cells that it does not see plays no part.
    """
    n_stream, n, n_head, _ = q.shape
    out = np.zeros((n_stream, n, n_head, v.shape[3]))
    for s, i, head in np.ndindex(n_stream, n, n_head):
        bias = np.zeros(k.shape[1]) if mask is None else mask[s, i].astype(np.float64)
        seen = bias > -np.inf
        if not seen.any():
            continue
        kv_head = head // (n_head // k.shape[2])
        scores = k[s, seen, kv_head].astype(np.float64) @ q[s, i, head].astype(np.float64) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = scores + bias[seen] * alibi_slope(head, n_head, max_bias)
        sink = -np.inf if sinks is None else float(sinks[head])
        weights = np.exp(scores - max(scores.max(), sink))
        total = weights.sum() + np.exp(sink - max(scores.max(), sink))
        out[s, i, head] = weights @ v[s, seen, kv_head].astype(np.float64) / total
    return out
