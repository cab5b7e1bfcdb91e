"""Views of stored rows by heads: the one place that knows how K and V lie in a cache.

A cache's tensor is [width, n_cells, n_stream], a row a cell; `width` is at least that of all heads together. V may lie
by channel in the same memory instead: all cells of a stream, channel by channel.
"""

from __future__ import annotations

from typing import NamedTuple

from pykv.ggml import Arena, Tensor, ops


class Heads(NamedTuple):
    """`n` heads of `width` elements, which begin every `step` elements of a row; 0 = one behind the other."""

    n: int
    width: int
    step: int = 0


class Cells(NamedTuple):
    """The first `n` cells of `n_stream` streams from `s0` on."""

    n: int
    s0: int = 0
    n_stream: int = 1


def by_row(arena: Arena, x: Tensor, heads: Heads, cells: Cells) -> Tensor:
    """Return [head, n_head, n_cells, n_stream] of a tensor with a row a cell."""
    ne = (heads.width, heads.n, cells.n, cells.n_stream)
    nb = (x.dtype.row_size(heads.step or heads.width), x.nb[1], x.nb[2])
    return ops.view(arena, x, ne, nb, cells.s0 * x.nb[2])


def by_channel(arena: Arena, x: Tensor, heads: Heads, cells: Cells) -> Tensor:
    """Return [n_cells, n_head, head, n_stream] of a tensor whose memory holds a line of all its cells a channel."""
    channel = x.dtype.type_size * x.ne[1]
    ne = (cells.n, heads.n, heads.width, cells.n_stream)
    return ops.view(arena, x, ne, (channel * heads.width, channel, x.nb[2]), cells.s0 * x.nb[2])
