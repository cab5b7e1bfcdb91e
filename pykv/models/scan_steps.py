"""Earlier states of a scan that returns its newest alone: the last tokens go one by one, each from the state before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pykv.batch import UBatch
from pykv.ggml import DType, Tensor, ops
from pykv.models.graph_builder import GraphBuilder
from pykv.typing import AnyArray

Scan = Callable[[range, Tensor | None], tuple[Tensor, Tensor]]
"""Scans some tokens of each sequence, from the states after the tokens before, None for those before the ubatch.

Returns results [dim, n_head, n_tokens, n_seqs], the last two dims folded or not, and the states [n_embd_s, n_seqs].
"""


def scan_all(b: GraphBuilder, scan: Scan) -> tuple[Tensor, Tensor]:
    """Return the results of all tokens, and the states [n_embd_s, n_seqs, n_planes], newest first.

    One scan, with folded dims as it left them, where the newest states are all that is kept.
    """
    n_tokens, n_planes, n_seqs = b.states.n_seq_tokens, b.states.n_planes, b.states.n_seqs
    n_first = n_tokens - n_planes + 1
    y, state = scan(range(n_first), None)
    if n_planes == 1:
        return y, state
    results, states = [y], [state]
    for i in range(n_first, n_tokens):
        y, state = scan(range(i, i + 1), state)
        results.append(y)
        states.append(state)
    apart = [ops.reshape(b.arena, y, *y.ne[:2], y.ne[2] * y.ne[3] // n_seqs, n_seqs) for y in results]
    return ops.join(b.arena, apart, 2), ops.join(b.arena, states[::-1], 2)


def some_tokens(b: GraphBuilder, x: Tensor, tokens: range, dim: int) -> Tensor:
    """Return a view of some tokens of each sequence; those of `x` lie along `dim`, the sequences along the next."""
    if len(tokens) == b.states.n_seq_tokens:
        return x
    n0, n1, n2, n3 = (len(tokens) if i == dim else n for i, n in enumerate(x.ne))
    return ops.view(b.arena, x, (n0, n1, n2, n3), x.nb[1:], tokens.start * x.nb[dim])


def each_state(b: GraphBuilder) -> Tensor:
    """Return the numbers of the sequences, [n_seqs] i32: the index of states that a scan has returned."""
    return b.input(DType.I32, (b.states.n_seqs,), "each_state", _count)


def _count(out: AnyArray, ubatch: UBatch) -> None:
    out[...] = np.arange(out.size)
