"""Token shift: each token sees some inputs of the token before it, which may have come with an earlier ubatch."""

from __future__ import annotations

from collections.abc import Sequence

from pykv.ggml import Tensor, ops
from pykv.models.graph_builder import GraphBuilder


def read(b: GraphBuilder, il: int, n_shifted: int) -> Tensor:
    """Return the inputs of the tokens before the ubatch, [n_embd, n_shifted, n_seqs]."""
    rows = b.states.read_r(il)
    return ops.reshape(b.arena, rows, rows.ne[0] // n_shifted, n_shifted, b.states.n_seqs)


def before(b: GraphBuilder, x: Tensor, past: Tensor, which: int) -> Tensor:
    """Return for each token of `x` [n_embd, n_tokens] the token before it; `which` of `past` comes before the first."""
    n, n_tokens, n_seqs = x.ne[0], b.states.n_seq_tokens, b.states.n_seqs
    (element, row, seq, _) = past.nb
    first = ops.view(b.arena, past, (n, 1, n_seqs, 1), (row, seq, seq * n_seqs), which * row)
    if n_tokens == 1:
        return ops.reshape(b.arena, ops.cont(b.arena, first), n, n_seqs)
    row, seq = element * n, element * n * n_tokens
    rest = ops.view(b.arena, x, (n, n_tokens - 1, n_seqs, 1), (row, seq, seq * n_seqs), 0)
    return ops.reshape(b.arena, ops.concat(b.arena, first, rest, 1), n, n_tokens * n_seqs)


def write(b: GraphBuilder, il: int, inputs: Sequence[Tensor]) -> None:
    """Keep the last token of each of some inputs [n_embd, n_tokens] for the next ubatch, and those that it may need."""
    n, n_tokens, n_seqs = inputs[0].ne[0], b.states.n_seq_tokens, b.states.n_seqs

    def last_but(d: int, x: Tensor) -> Tensor:
        row, seq = x.nb[1], x.nb[1] * n_tokens
        return ops.view(b.arena, x, (n, 1, n_seqs, 1), (row, seq, seq * n_seqs), row * (n_tokens - 1 - d))

    def rows(d: int) -> Tensor:
        return ops.join(b.arena, [last_but(d, x) for x in inputs], 1)

    b.states.write_r(il, [rows(d) for d in range(b.states.n_planes)])
