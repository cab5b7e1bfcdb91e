"""ShiftSupport: whether the positions of a memory can be moved, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShiftSupport:
    """True if positions can be moved.

    Attributes
    ----------
    reason : None, or one word that says why not, such as "multi_dim_positions".
    detail : the same in a sentence.
    is_lossy : keys are stored in blocks, so that each move rounds them anew.
    """

    reason: str | None = None
    detail: str = ""
    is_lossy: bool = False

    def __bool__(self) -> bool:
        return self.reason is None
