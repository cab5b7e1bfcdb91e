"""AttentionChoice: the plan that a context follows, and why it is that one."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.memory.attention import AttentionPlan


@dataclass(frozen=True)
class AttentionInUse:
    """How attention is computed at the moment; each path is "fused", "flash" or "matmul".

    Attributes
    ----------
    generation : path of a single token, and of fewer than 64 in a stream, as deep as the memory is filled now.
    prompts : path of 64 tokens and more.
    reason : what was asked for, measured, or impossible.
    """

    generation: str
    prompts: str
    reason: str


@dataclass(frozen=True)
class AttentionChoice:
    """A plan and what spoke for it."""

    plan: AttentionPlan
    reason: str

    def in_use(self, v_trans: bool) -> AttentionInUse:
        """Return the paths over V as it is stored."""
        return AttentionInUse(self.plan.path(1, v_trans).value, self.plan.many.value, self.reason)
