"""AttentionChoice: the plan that a context follows, and why it is that one."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.memory.attention import MANY_TOKENS, AttentionPlan


@dataclass(frozen=True)
class AttentionInUse:
    """How attention is computed at the moment; each path is "fused", "flash" or "matmul".

    Attributes
    ----------
    generation : path of a single token, and of fewer than 64 in a stream, as deep as the memory is filled now.
    prompts : path of 64 tokens and more, as deep.
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

    def in_use(self, v_trans: bool, n_kv: int) -> AttentionInUse:
        """Return the paths over `n_kv` cells and V as it is stored."""
        one, many = (self.plan.path(n, v_trans, n_kv) for n in (1, MANY_TOKENS))
        return AttentionInUse(one.value, many.value, self.reason)
