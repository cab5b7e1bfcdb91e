"""What to do with a full or a half matching cache, worked out as data.

A policy reads numbers and token ids and returns a plan; the caller carries it out with the verbs of its memory.
"""

from pykv.policies.chunk_reuse import ChunkMove, ChunkReuse, plan_reuse
from pykv.policies.context_shift import ContextShift, kept_prompt, plan_shift

__all__ = ["ChunkMove", "ChunkReuse", "ContextShift", "kept_prompt", "plan_reuse", "plan_shift"]
