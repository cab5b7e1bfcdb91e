"""Resumable: whether decoding may go on at a position, and if not, why and where else.

Source: spec session.md sections 5.1 and 5.5.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Resumable:
    """True if all that the next token must see is there.

    Attributes
    ----------
    largest : the largest position, not beyond the one asked for, at which decoding may go on; 0 = from the beginning.
    reason : None, or one word that says why not: "missing", "window_gone", "state_gone", "rollback_pending".
    detail : the same in a sentence.
    """

    largest: int
    reason: str | None = None
    detail: str = ""

    def __bool__(self) -> bool:
        return self.reason is None
