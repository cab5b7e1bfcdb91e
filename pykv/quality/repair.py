"""Repair: compute some of the moved tokens again, where they are. Which ones, and how.

In the manner of CacheBlend (https://arxiv.org/abs/2405.16444): a few tokens, whose keys are farthest from what they
would be, carry most of the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from pykv.batch import Batch
from pykv.errors import ParamError
from pykv.runtime import Context
from pykv.typing import F32Array

Choice = Literal["first", "deviation"]
CHOICES: tuple[Choice, ...] = ("first", "deviation")

SEQ, SCRATCH = 0, 1
"""The sequence that is mended, and one that holds what comes behind a token while that is computed."""

Run = tuple[int, int]
"""Positions [p0, p1)."""


def first_run(start: int, n_moved: int, share: float) -> list[Run]:
    """Return the first `share` of moved tokens, the first of which lies at `start`: exact again, since all that they
    attend to is.
    """
    n = _count(n_moved, share)
    return [(start, start + n)] if n else []


def deviating_runs(start: int, stale: F32Array, fresh: F32Array, share: float) -> list[Run]:
    """Return the tokens whose keys lie farthest from fresh ones, in runs of neighbours.

    Parameters
    ----------
    stale, fresh : keys (n_moved, n_head_kv, n_embd_head) of one layer.
    """
    off = np.square(stale.astype(np.float64) - fresh).reshape(len(stale), -1).sum(1)
    chosen = np.sort(np.argsort(-off, kind="stable")[: _count(len(stale), share)])
    ends = np.flatnonzero(np.diff(chosen) > 1)
    return [(start + int(run[0]), start + int(run[-1]) + 1) for run in np.split(chosen, ends + 1) if len(run)]


def recompute(context: Context, tokens: Sequence[int], runs: Sequence[Run]) -> int:
    """Compute the tokens of some runs again, in order; returns how many.

    What lies behind a run is left to another sequence meanwhile, which shares its cells, since a sequence grows at its
    end only.

    Parameters
    ----------
    tokens : the tokens at positions 0, 1, 2 and so on.
    """
    memory = context.memory
    for p0, p1 in runs:
        memory.seq_cp(SEQ, SCRATCH, p1, -1)
        memory.seq_rm(SEQ, p0, -1)
        for at in range(p0, p1, context.n_batch):
            part = tokens[at : min(at + context.n_batch, p1)]
            context.decode(Batch(part, seq_id=[SEQ] * len(part), logits="none"))
        memory.seq_cp(SCRATCH, SEQ, p1, -1)
        memory.seq_rm(SCRATCH, -1, -1)
    return sum(p1 - p0 for p0, p1 in runs)


def check_choice(choose: object) -> Choice:
    """Return a way to choose; raises `ParamError` where it is none."""
    for choice in CHOICES:
        if choose == choice:
            return choice
    raise ParamError(f"choose={choose!r} must be one of {', '.join(map(repr, CHOICES))}")


def _count(n: int, share: float) -> int:
    return round(n * share)
