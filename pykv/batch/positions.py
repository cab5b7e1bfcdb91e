"""The positions of a batch: filled in where the caller gave none, and held against what the memory stores.

Positions of one sequence continue its stored ones without a gap and never run backwards; sequences that share
a token store the same range. Reads the memory, changes nothing.
Follows llama.cpp's ``llama_batch_allocr::init``.
"""

from __future__ import annotations

import numpy as np

from pykv.batch.arrays import ends, frozen
from pykv.batch.batch import Batch
from pykv.batch.limits import BatchLimits
from pykv.batch.membership import Membership
from pykv.errors import BatchError
from pykv.typing import NO_POS, I32Array, PositionSource


def place(batch: Batch, limits: BatchLimits, members: Membership, memory: PositionSource | None) -> I32Array:
    """Return the checked positions of a batch, (n_pos, n), read-only."""
    given = batch.pos
    sequential = _continued(members, memory, limits.pos_end) if given is None else given[0]
    if given is not None:
        _check_bounds(given, limits.pos_end)
    if given is not None or members.coupled:  # else true by construction
        _check(sequential, batch, limits, members, memory)
    return frozen(_sections(batch, sequential, limits.n_pos_per_embd))


def _continued(members: Membership, memory: PositionSource | None, pos_end: int) -> I32Array:
    """Number each token in its leading sequence, from the first position that is not stored."""
    n = len(members.lead)
    if len(members.unique) == 1:
        start = _next_position(members.unique[0], n, memory, pos_end)
        return np.arange(start, start + n, dtype=np.int32)
    seqs, of_token, counts = np.unique(members.lead, return_inverse=True, return_counts=True)
    starts = [_next_position(*run, memory, pos_end) for run in zip(seqs.tolist(), counts.tolist(), strict=True)]
    pos = np.empty(n, np.int32)
    rank = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    pos[np.argsort(of_token, kind="stable")] = rank + np.repeat(starts, counts)
    return pos


def _next_position(seq: int, n: int, memory: PositionSource | None, pos_end: int) -> int:
    last = NO_POS if memory is None else memory.pos_max(seq)
    if last + n >= pos_end:
        raise BatchError(
            f"sequence {seq}: {n} tokens after position {last} would pass the largest position {pos_end - 1}",
            seq_id=seq,
            last=last,
            first=last + 1,
        )
    return last + 1


def _check_bounds(pos: I32Array, pos_end: int) -> None:
    # differs from llama.cpp: both ends refused, because -1 marks an empty cell, and because POS_INF lies
    # outside every half-open range
    low, high = ends(pos)
    if low < 0 or high >= pos_end:
        raise BatchError(f"pos must lie in [0, {pos_end}), got {low if low < 0 else high}")


def _check(
    pos: I32Array, batch: Batch, limits: BatchLimits, members: Membership, memory: PositionSource | None
) -> None:
    n_pos, pure_embd = limits.n_pos_per_embd, batch.token is None
    if len(members.unique) == 1 and _plain_run(pos, n_pos == 1):
        seq = members.unique[0]
        _check_start(seq, NO_POS if memory is None else memory.pos_max(seq), int(pos[0]), n_pos, pure_embd)
        return
    runs = _Runs(pos, members)
    last = {seq: NO_POS if memory is None else memory.pos_max(seq) for seq in runs.seqs}
    for i, seq in enumerate(runs.seqs):
        _check_start(seq, last[seq], runs.lows[i], n_pos, pure_embd)
        if n_pos == 1:
            runs.check_gaps(i, last[seq])
    if members.coupled and memory is not None:
        _check_coupled(members, memory)
    runs.check_order(last)


def _plain_run(pos: I32Array, gapless: bool) -> bool:
    """Return whether the positions of a single sequence never decrease and, if `gapless`, leave none out."""
    if len(pos) == 1:
        return True
    steps = pos[1:] - pos[:-1]
    return bool(steps.min() >= 0 and (not gapless or steps.max() <= 1))


def _check_start(seq: int, last: int, first: int, n_pos: int, pure_embd: bool) -> None:
    """Refuse a first position that does not continue a stored one (batch.md 2.1)."""
    if last < 0:
        return
    if n_pos == 1:
        fits, needed = first == last + 1, f"{last + 1}"
    elif pure_embd:
        # rows and columns of an image may share the position of the text before it
        fits, needed = first >= last, f"{last} or more"
    else:
        fits, needed = first > last, f"{last + 1} or more"
    if not fits:
        raise BatchError(
            f"sequence {seq}: the last stored position is {last}, the first offered {first}; needs {needed}",
            seq_id=seq,
            last=last,
            first=first,
        )


def _check_coupled(members: Membership, memory: PositionSource) -> None:
    """Refuse tokens shared by sequences that store different ranges of positions (batch.md 2.2)."""
    pairs = {(ids[0], other): None for ids in dict.fromkeys(members.ids) for other in ids[1:]}
    for one, other in pairs:
        low, high = memory.pos_min(one), memory.pos_max(one)
        other_low, other_high = memory.pos_min(other), memory.pos_max(other)
        if (low, high) != (other_low, other_high):
            raise BatchError(
                f"sequences {one} and {other} share a token but have diverged: they store positions "
                f"{low}..{high} and {other_low}..{other_high}; the same range is needed",
                seq_id=other,
                last=other_high,
            )


class _Runs:
    """The sequential positions of a batch, sequence by sequence, each run in batch order."""

    def __init__(self, pos: I32Array, members: Membership) -> None:
        tokens, seqs = members.pairs()
        by_seq = np.argsort(seqs, kind="stable")
        self.tokens = tokens[by_seq]
        self.seq = seqs[by_seq]
        self.pos = pos[self.tokens]
        self.same = self.seq[1:] == self.seq[:-1]
        self.heads = np.concatenate(([0], np.flatnonzero(~self.same) + 1))
        self.seqs: list[int] = self.seq[self.heads].tolist()
        self.lows: list[int] = np.minimum.reduceat(self.pos, self.heads).tolist()
        self._gap = self._first_gaps()

    def _first_gaps(self) -> dict[int, tuple[int, int]]:
        """Map each sequence with a gap to the positions around its first one."""
        ascending = self.pos[np.lexsort((self.pos, self.seq))]
        after = np.flatnonzero(self.same & (np.diff(ascending) > 1))[::-1]
        edges = np.stack((self.seq[after], ascending[after], ascending[after + 1]), axis=1).tolist()
        return {seq: (before, behind) for seq, before, behind in edges}

    def check_gaps(self, i: int, last: int) -> None:
        seq = self.seqs[i]
        if seq in self._gap:
            before, behind = self._gap[seq]
            raise BatchError(
                f"sequence {seq}: the batch jumps from position {before} to {behind}; needs {before + 1} "
                f"(last stored position {last}, first offered {self.lows[i]})",
                seq_id=seq,
                last=last,
                first=self.lows[i],
            )

    def check_order(self, last: dict[int, int]) -> None:
        backwards = np.flatnonzero(self.same & (np.diff(self.pos) < 0))
        if not backwards.size:
            return
        at = int(backwards[self.tokens[backwards + 1].argmin()])
        seq = int(self.seq[at])
        raise BatchError(
            f"sequence {seq}: positions must not decrease, but token {self.tokens[at + 1]} at position "
            f"{self.pos[at + 1]} follows position {self.pos[at]} (last stored position {last[seq]})",
            seq_id=seq,
            last=last[seq],
            first=self.lows[self.seqs.index(seq)],
        )


def _sections(batch: Batch, sequential: I32Array, n_pos: int) -> I32Array:
    """Return all sections of the positions, (n_pos, n)."""
    if batch.pos is not None and len(batch.pos) == n_pos:
        return batch.pos
    n = len(sequential)
    if n_pos == 1:
        return sequential.reshape(1, n)
    if batch.token is not None:
        return np.repeat(sequential.reshape(1, n), n_pos, axis=0)
    pos = np.zeros((n_pos, n), np.int32)
    pos[0] = sequential
    return pos
