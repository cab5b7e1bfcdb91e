"""Chunk reuse: which parts of a cached text a new prompt can take over, though some of what was between is gone.

    cached   aaaa cccc bbbb
    prompt   aaaa bbbb          bbbb moves to where cccc was

Lossy: a part that moves has attended to what was before it. Source: spec session.md section 3; follows llama.cpp's
server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pykv.cells.arguments import integer
from pykv.errors import ParamError
from pykv.typing import POS_INF, AnyArray


@dataclass(frozen=True)
class ChunkMove:
    """One part that moves: remove ``removed``, then move ``moved`` by ``delta``.

    Attributes
    ----------
    dst, src : its first position afterwards and before.
    length : its tokens.
    """

    dst: int
    src: int
    length: int

    @property
    def removed(self) -> tuple[int, int]:
        """The positions [p0, p1) that go, for `seq_rm`."""
        return self.dst, self.src

    @property
    def moved(self) -> tuple[int, int]:
        """The positions [p0, p1) that move, for `seq_add`."""
        return self.src, self.src + self.length

    @property
    def delta(self) -> int:
        """By how much they move: always to the left."""
        return self.dst - self.src


@dataclass(frozen=True)
class ChunkReuse:
    """What a prompt takes over.

    Attributes
    ----------
    n_prefix : tokens that are equal from the start; they stay, and nothing is lost by using them.
    moves : parts to be moved, in this order.
    n_matched : tokens of the prompt that are stored afterwards; what lies behind them is to be removed.
    n_usable : as many, but one less than the prompt: its last token must be evaluated, to know what follows.
    """

    n_prefix: int
    moves: tuple[ChunkMove, ...]
    n_matched: int
    n_usable: int


def plan_reuse(cached: Sequence[int], prompt: Sequence[int], min_chunk: int) -> ChunkReuse:
    """Return which parts of cached tokens a prompt can take over, the first one that fits each time.

    What the prompt has more than the cache is not bridged: the first such token ends the search.

    Parameters
    ----------
    cached : token ids at positions 0, 1, 2 and so on.
    prompt : token ids.
    min_chunk : tokens of a part that is worth moving; 0 = only the equal start is taken over.

    Raises
    ------
    ParamError : something else than token ids, or a negative `min_chunk`.
    """
    old, new = _tokens("cached", cached), _tokens("prompt", prompt)
    min_chunk = integer("min_chunk", min_chunk, 0, POS_INF)
    n_prefix = n = _equal(old, new, 0, 0)
    moves = []
    if min_chunk:
        src = n
        while (src := _find(old, new[n : n + min_chunk], src, min_chunk)) >= 0:
            length = _equal(old, new, src, n)
            moves.append(ChunkMove(n, src, length))
            n, src = n + length, src + length
    return ChunkReuse(n_prefix, tuple(moves), n, min(n, max(0, len(new) - 1)))


def _find(tokens: list[int], chunk: list[int], start: int, length: int) -> int:
    """Return where a chunk of that length occurs first, from `start` on; -1 if nowhere, or if it is shorter."""
    if len(chunk) < length:
        return -1
    last = len(tokens) - length
    while start <= last:
        try:
            start = tokens.index(chunk[0], start, last + 1)
        except ValueError:
            return -1
        if tokens[start : start + length] == chunk:
            return start
        start += 1
    return -1


def _equal(old: list[int], new: list[int], i: int, j: int) -> int:
    """Return how many tokens are equal from `old[i]` and `new[j]` on."""
    n, most = 0, min(len(old) - i, len(new) - j)
    while n < most and old[i + n] == new[j + n]:
        n += 1
    return n


def _tokens(name: str, ids: Sequence[int]) -> list[int]:
    array: AnyArray = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ParamError(f"{name}: must be a sequence of token ids, got {array.dtype} of shape {array.shape}")
    tokens: list[int] = array.tolist()
    return tokens
