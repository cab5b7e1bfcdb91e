"""Context shift: which tokens of a full sequence give way, and where those behind them go.

    S0 S1 u2 u3 u4 u5 u6 u7     keep 2, discard 3
    S0 S1 u5 u6 u7

Lossy: what is left has attended to what is gone. Source: spec session.md section 2; follows llama.cpp's server.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykv.cells.arguments import integer
from pykv.errors import ContextLengthExceeded, ParamError
from pykv.typing import POS_INF

ROOM = 4
"""Tokens of a context that even a whole prompt leaves to be discarded from."""


@dataclass(frozen=True)
class ContextShift:
    """One shift: remove ``removed``, then move ``moved`` by ``delta``.

    Attributes
    ----------
    n_past : tokens before it.
    n_keep : tokens at the front that stay where they are.
    n_discard : tokens behind them that go.
    """

    n_past: int
    n_keep: int
    n_discard: int

    @property
    def removed(self) -> tuple[int, int]:
        """The positions [p0, p1) that go, for `seq_rm`."""
        return self.n_keep, self.n_keep + self.n_discard

    @property
    def moved(self) -> tuple[int, int]:
        """The positions [p0, p1) that move, for `seq_add`."""
        return self.n_keep + self.n_discard, self.n_past

    @property
    def delta(self) -> int:
        """By how much they move."""
        return -self.n_discard

    @property
    def n_left(self) -> int:
        """Tokens afterwards, which is also the next position."""
        return self.n_past - self.n_discard


def plan_shift(n_past: int, n_ctx: int, n_keep: int, n_discard: int = 0, *, n_discard_min: int = 1) -> ContextShift:
    """Return how to make room in a sequence.

    Parameters
    ----------
    n_past : tokens that it holds, at positions 0 to ``n_past - 1``.
    n_ctx : tokens that it can hold.
    n_keep : tokens to keep at the front, all that count: also one that the model puts before every prompt.
    n_discard : tokens to drop behind them, 0 = half; never all of them.
    n_discard_min : fewer are not worth it: with 1, it may happen that each new token needs a shift.

    Raises
    ------
    ContextLengthExceeded : nothing, or too little, can be dropped.
    ParamError : a number that makes no sense; the message names it.
    """
    n_ctx = integer("n_ctx", n_ctx, 1, POS_INF)
    n_past = integer("n_past", n_past, 0, n_ctx)
    # differs from llama.cpp: no start token is added, and a number beyond n_ctx - 4 is not lowered in silence, because
    # then tokens would go that the caller has asked to keep; for a whole prompt see `kept_prompt`
    n_keep = integer("n_keep", n_keep, 0, n_ctx)
    n_discard = integer("n_discard", n_discard, 0, POS_INF)
    n_discard_min = integer("n_discard_min", n_discard_min, 1, POS_INF)
    left = n_past - n_keep
    most = max(0, left - 1)
    n = min(n_discard or left // 2, most)
    if n < n_discard_min:
        raise ContextLengthExceeded(
            f"cannot shift: of {n_past} tokens in a context of {n_ctx}, {n_keep} are to be kept; {max(0, n)} could be "
            f"dropped, at least {n_discard_min} should"
        )
    return ContextShift(n_past, n_keep, n)


def kept_prompt(n_prompt: int, n_ctx: int) -> int:
    """Return the `n_keep` of a whole prompt: all of it, or as much as leaves room to shift at all.

    Raises
    ------
    ParamError : the context has no such room.
    """
    n_prompt, n_ctx = integer("n_prompt", n_prompt, 0, POS_INF), integer("n_ctx", n_ctx, 1, POS_INF)
    if n_ctx <= ROOM:
        raise ParamError(f"n_ctx = {n_ctx}: must be more than {ROOM} for tokens to give way")
    return min(n_prompt, n_ctx - ROOM)
