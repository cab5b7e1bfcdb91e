"""Cut: a text of which a part in the middle is taken out, so that what lies behind it moves to the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykv.cells.arguments import integer
from pykv.errors import ParamError
from pykv.policies.context_shift import plan_shift


@dataclass(frozen=True)
class Cut:
    """Tokens at positions 0, 1, 2 and so on, and which of them go.

    Attributes
    ----------
    stored : tokens that are stored before the cut.
    start, end : positions [start, end) that go; those behind them move by ``start - end``.
    after : tokens that follow, from whose next-token distributions the quality is told.
    """

    stored: tuple[int, ...]
    start: int
    end: int
    after: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end < len(self.stored):
            raise ParamError(
                f"start={self.start}, end={self.end}: 0 <= start < end < {len(self.stored)}, the tokens that are "
                "stored, so that something goes and something moves"
            )
        if not self.after:
            raise ParamError("after=() must be at least one token")

    @property
    def moved(self) -> tuple[int, ...]:
        """The tokens that move."""
        return self.stored[self.end :]

    @property
    def kept(self) -> tuple[int, ...]:
        """The tokens before them, which stay where they are."""
        return self.stored[: self.start]

    @property
    def n_left(self) -> int:
        """Tokens behind which the rest follows."""
        return len(self.stored) - (self.end - self.start)


def shift_cut(tokens: Sequence[int], n_after: int, n_keep: int = 0, n_discard: int = 0) -> Cut:
    """Return the cut of a context shift that comes `n_after` tokens before the end of a text.

    Parameters
    ----------
    tokens : the text.
    n_after : tokens at its end that follow the shift.
    n_keep, n_discard : as of `plan_shift`: tokens kept at the front, and dropped behind them; 0 = half.

    Raises
    ------
    ParamError, ContextLengthExceeded : the text is too short for it.
    """
    stored, after = _apart(tokens, n_after)
    shift = plan_shift(len(stored), len(stored) + n_after, n_keep, n_discard)
    return Cut(stored, *shift.removed, after)


def chunk_cut(tokens: Sequence[int], n_after: int, start: int, end: int) -> Cut:
    """Return the cut of a prompt that lacks the tokens [start, end) of a text that is stored whole.

    Raises
    ------
    ParamError : there is no such part, or nothing behind it.
    """
    stored, after = _apart(tokens, n_after)
    return Cut(stored, integer("start", start, 0, len(stored)), integer("end", end, 0, len(stored)), after)


def _apart(tokens: Sequence[int], n_after: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    n_after = integer("n_after", n_after, 1, max(1, len(tokens)))
    if len(tokens) < n_after + 3:
        raise ParamError(f"tokens: {len(tokens)} of them, too few to cut with n_after={n_after} behind the cut")
    whole = tuple(map(int, tokens))
    return whole[:-n_after], whole[-n_after:]
