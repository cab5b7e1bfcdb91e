"""AttentionChoice: the plan that a context follows, and why it is that one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pykv.memory.attention import AttentionPlan


class PathsInUse(NamedTuple):
    """How attention is computed next; each path is "fused", "flash" or "matmul".

    Attributes
    ----------
    generation : path of a single token, and of fewer than 64 in a stream.
    prompts : path of 64 tokens.
    """

    generation: str
    prompts: str


NO_PATHS = PathsInUse("none", "none")
"""Where no layer attends."""


@dataclass(frozen=True)
class AttentionInUse:
    """How attention is computed next, as deep as the memory is filled now.

    Attributes
    ----------
    generation : path of a single token, and of fewer than 64 in a stream, in layers that see everything, or in all if
        none does: "fused", "flash", "matmul", or "none" if no layer attends.
    prompts : path of 64 tokens and more, of the same layers.
    reason : what was asked for, measured, or impossible.
    kinds : both paths by kind of layer, named as in `Memory.visible`: "full", "standard" and so on. Layers with a
        window may take another one than those that see everything: they never look at so many cells.
    """

    generation: str
    prompts: str
    reason: str
    kinds: Mapping[str, PathsInUse]


@dataclass(frozen=True)
class AttentionChoice:
    """A plan and what spoke for it."""

    plan: AttentionPlan
    reason: str

    def in_use(self, kinds: Mapping[str, PathsInUse]) -> AttentionInUse:
        """Return the paths of a memory that follows the plan, see `Memory.paths`."""
        return AttentionInUse(*next(iter(kinds.values()), NO_PATHS), self.reason, kinds)
