"""A convolution of each channel over its last few tokens, which go over from one ubatch to the next."""

from __future__ import annotations

from pykv.ggml import Tensor, ops
from pykv.models.graph_builder import GraphBuilder


def convolve(b: GraphBuilder, il: int, x: Tensor, kernel: Tensor) -> Tensor:
    """Return the convolution of `x` and what came before it, and keep what the next tokens will need.

    `x` [n_channel, n_seq_tokens, n_seqs], `kernel` [n_conv, n_channel] → [n_channel, n_seq_tokens, n_seqs].
    """
    (n_conv, n_channel), (_, n_tokens, n_seqs, _) = kernel.ne[:2], x.ne
    past = ops.reshape(b.arena, b.states.read_r(il), n_conv - 1, n_channel, n_seqs)
    line = ops.concat(b.arena, past, ops.transpose(b.arena, x), 0)

    def recent(d: int) -> Tensor:
        """Return the inputs of the n_conv - 1 tokens before the last `d`."""
        ne, nb = (n_conv - 1, n_channel, n_seqs, 1), line.nb
        return ops.view(b.arena, line, ne, (nb[1], nb[2], nb[2] * n_seqs), nb[0] * (n_tokens - d))

    b.states.write_r(il, [recent(d) for d in range(b.states.n_planes)])
    return ops.ssm_conv(b.arena, line, kernel)


def channels(b: GraphBuilder, x: Tensor, n: int, at: int) -> Tensor:
    """Return a view of `n` channels of [n_channel, n_seq_tokens, n_seqs], from the one at `at` on."""
    (_, n_tokens, n_seqs, _), nb = x.ne, x.nb
    return ops.view(b.arena, x, (n, n_tokens, n_seqs, 1), nb[1:], nb[0] * at)


def heads(b: GraphBuilder, x: Tensor, head: int, n_head: int, at: int) -> Tensor:
    """Return a view of such channels as [head, n_head, n_seq_tokens, n_seqs]."""
    (_, n_tokens, n_seqs, _), nb = x.ne, x.nb
    return ops.view(b.arena, x, (head, n_head, n_tokens, n_seqs), (nb[0] * head, nb[1], nb[2]), nb[0] * at)
