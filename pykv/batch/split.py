"""Cuts a checked batch into the ubatches that are computed one after another.

Three cuts: as it comes (`simple`), the same number of tokens from several sequences (`equal`), one sequence
at a time (`seq`). Never takes a token twice, never changes the batch.
Follows llama.cpp's ``llama_batch_allocr``.

    batch  0@0 0@1 0@2 1@0 1@1     simple(4)  0 0 0 1 | 1      equal(4)  0 0 1 1 | 0      seq(4)  0 0 0 | 1 1
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain

import numpy as np

from pykv.batch.batch import IdSets
from pykv.batch.ubatch import UBatch
from pykv.batch.valid import ValidBatch
from pykv.errors import ParamError
from pykv.log import logger
from pykv.typing import I64Array

_log = logger(__name__)


class Splitter:
    """Hands out a batch piece by piece.

    Attributes
    ----------
    valid : the batch.
    n_used : how many of its tokens have been handed out.
    out_ids : batch indices of the outputs handed out, in the order of computation.
    """

    # invariant: of the tokens of one id-set, the used ones come first, whatever cuts were mixed

    def __init__(self, valid: ValidBatch) -> None:
        self.valid = valid
        self.reset()

    def reset(self) -> None:
        """Take all tokens back."""
        self.n_used = 0
        self.out_ids: list[int] = []
        self._used = np.zeros(self.valid.n_tokens, np.bool_)
        self._cursor: I64Array | None = None  # (n_sets,) used tokens of each set; None = to be counted

    def simple(self, m: int) -> UBatch | None:
        """Return the next `m` tokens or what is left of the batch; None when nothing is.

        note: after a cut of another kind it passes over the tokens that this has taken.
        """
        _check_m(m)
        n, start = self.valid.n_tokens, self.n_used
        if start == n:
            return None
        self._cursor = None  # counts are kept per set, and this cut does not look at sets
        if not start or not self._used[start:].any():
            stop = min(start + m, n)
            ids = self.valid.seq_id_unq
            if len(ids) > 1 and stop - start < n:
                ids = _distinct(self.valid.seq_ids[start:stop])
            return self._run(start, stop, ids, stop - start, equal_seqs=False)
        # differs from llama.cpp: passes over used tokens (there: straight on), so none is taken twice
        tokens = np.flatnonzero(~self._used)[:m]
        ids = _distinct(tuple(map(self.valid.seq_ids.__getitem__, tokens.tolist())))
        return self._gather(tokens, ids, len(tokens), equal_seqs=False)

    def equal(self, m: int, *, sequential: bool, keep_tail: int = 0) -> UBatch | None:
        """Return as many tokens from each of several id-sets, at most `m` in all; None when nothing is left.

        Parameters
        ----------
        m
            Most tokens of the ubatch.
        sequential
            Take single sequences with consecutive ids only, as a cache with streams needs. A batch with
            coupled sequences cannot be cut so: logs an error and returns None, with ``n_used < n_tokens``.
        keep_tail
            Leave a set with no tokens or at least this many, for memories that can roll back only within
            the newest ubatch. Less than `m`.

        Source: batch.md 5.
        """
        _check_m(m)
        if not 0 <= keep_tail < m:
            raise ParamError(f"keep_tail must lie in [0, m = {m}), got {keep_tail}")
        if sequential and self.valid.has_coupled:
            _log.error("a sequential split cannot take coupled sequences; they need a unified memory")
            return None
        if self.n_used == self.valid.n_tokens:
            return None
        chosen = self._consecutive_sets(m) if sequential else self._disjoint_sets(m)
        left = self._left()[chosen]
        # one token from each set a round, while a whole round fits into m
        taken = min(int(left.min()), m // len(chosen))
        if keep_tail:
            k, taken = _spare_tails(left, taken, m, keep_tail)
            chosen = chosen[:k]
        return self._lockstep(chosen, taken)

    def seq(self, m: int, *, narrow: bool = True) -> UBatch | None:
        """Return at most `m` tokens of one sequence; None when nothing is left.

        Follows one id-set in batch order and narrows down to any smaller set contained in it on the way, unless
        `narrow` is False: a recurrent state, for one, is the same for all tokens of a set.

        Source: batch.md 6.
        """
        _check_m(m)
        if self.n_used == self.valid.n_tokens:
            return None
        groups, cursor = self.valid.groups, self._cursors()
        heads = self._heads()
        first = int(groups.of_token[heads.min()])
        current: int | None = first
        pieces: list[I64Array] = []
        n_taken = 0
        while current is not None and n_taken < m:
            narrower = self._narrower(current, heads) if narrow else None
            rest = groups.tokens[groups.start[current] + cursor[current] : groups.start[current + 1]]
            if narrower is not None:
                rest = rest[: np.searchsorted(rest, heads[narrower])]
            piece = rest[: m - n_taken]
            pieces.append(piece)
            cursor[current] += len(piece)
            n_taken += len(piece)
            current = narrower
        return self._gather(np.concatenate(pieces), groups.sets[first], 1, equal_seqs=True)

    # which sets

    def _cursors(self) -> I64Array:
        if self._cursor is None:
            groups = self.valid.groups
            self._cursor = np.bincount(groups.of_token[self._used], minlength=len(groups.sets))
        return self._cursor

    def _left(self) -> I64Array:
        return self.valid.groups.size - self._cursors()

    def _heads(self) -> I64Array:
        """Return the first unused token of each set, n_tokens where there is none."""
        groups = self.valid.groups
        at = groups.start[:-1] + self._cursors()
        n = self.valid.n_tokens
        return np.where(self._left() > 0, groups.tokens[np.minimum(at, n - 1)], n)

    def _disjoint_sets(self, m: int) -> I64Array:
        """Choose up to `m` sets without a common sequence, in the order of their first unused tokens."""
        # differs from llama.cpp: stops at m sets (there: m + 1), because the ubatch would outgrow its limit
        heads = self._heads()
        in_order = np.argsort(heads, kind="stable")[: np.count_nonzero(heads < self.valid.n_tokens)]
        if not self.valid.has_coupled:
            return in_order[:m]
        masks = self.valid.groups.masks
        chosen: list[int] = []
        covered = 0
        for i in in_order.tolist():
            if not covered & masks[i]:
                covered |= masks[i]
                chosen.append(i)
                if len(chosen) == m:
                    break
        return np.array(chosen)

    def _consecutive_sets(self, m: int) -> I64Array:
        """Choose up to `m` single sequences with consecutive ids, each seen after the one before it."""
        groups, ids = self.valid.groups, self.valid.seq_id_unq  # without coupling, set i is sequence ids[i]
        tokens, start, cursor = groups.token_list, groups.start.tolist(), self._cursors().tolist()
        at = int(self._heads().min())
        first = last = int(groups.of_token[at])
        while last - first + 1 < m and last + 1 < len(ids) and ids[last + 1] == ids[last] + 1:
            end = start[last + 2]
            seen = bisect_right(tokens, at, start[last + 1] + cursor[last + 1], end)
            if seen == end:
                break
            last, at = last + 1, tokens[seen]
        return np.arange(first, last + 1)

    def _narrower(self, current: int, heads: I64Array) -> int | None:
        """Return the set within `current`, but smaller, whose next unused token comes first."""
        groups = self.valid.groups
        if len(groups.sets[current]) == 1:
            return None
        outside = ~groups.masks[current]
        inner = [i for i, mask in enumerate(groups.masks) if not mask & outside and i != current]
        best = min(inner, key=heads.__getitem__, default=None)
        return None if best is None or heads[best] == self.valid.n_tokens else best

    # taking

    def _lockstep(self, chosen: I64Array, taken: int) -> UBatch:
        groups, cursor = self.valid.groups, self._cursors()
        at = groups.start[chosen] + cursor[chosen]
        tokens = groups.tokens[at[:, np.newaxis] + np.arange(taken)].reshape(-1)
        cursor[chosen] += taken
        ids = tuple(sorted(chain.from_iterable(groups.sets[i] for i in chosen.tolist())))
        return self._gather(tokens, ids, len(chosen), equal_seqs=True)

    def _gather(self, tokens: I64Array, ids: tuple[int, ...], n_seqs: int, *, equal_seqs: bool) -> UBatch:
        start, stop = int(tokens[0]), int(tokens[-1]) + 1
        ascending = n_seqs == 1 or not equal_seqs
        if ascending and stop - start == len(tokens):
            return self._run(start, stop, ids, n_seqs, equal_seqs=equal_seqs)
        valid = self.valid
        ubatch = UBatch(
            token=None if valid.token is None else valid.token[tokens],
            embd=None if valid.embd is None else valid.embd[tokens],
            pos=np.take(valid.pos, tokens, axis=1),
            seq_ids=tuple(map(valid.seq_ids.__getitem__, tokens.tolist())),
            seq_first=valid.seq_first[tokens],
            seq_id_unq=ids,
            output=valid.output[tokens],
            batch_idxs=tokens.astype(np.int32),
            n_seqs=n_seqs,
            equal_seqs=equal_seqs,
        )
        return self._count(ubatch, tokens)

    def _run(self, start: int, stop: int, ids: tuple[int, ...], n_seqs: int, *, equal_seqs: bool) -> UBatch:
        """Return neighbouring tokens, as views of the batch where these are contiguous."""
        valid, run = self.valid, slice(start, stop)
        if stop - start == valid.n_tokens:
            return self._count(whole(valid, n_seqs, equal_seqs=equal_seqs), run)
        ubatch = UBatch(
            token=None if valid.token is None else valid.token[run],
            embd=None if valid.embd is None else valid.embd[run],
            pos=np.ascontiguousarray(valid.pos[:, run]),
            seq_ids=valid.seq_ids[run],
            seq_first=valid.seq_first[run],
            seq_id_unq=ids,
            output=valid.output[run],
            batch_idxs=np.arange(start, stop, dtype=np.int32),
            n_seqs=n_seqs,
            equal_seqs=equal_seqs,
        )
        return self._count(ubatch, run)

    def _count(self, ubatch: UBatch, tokens: slice | I64Array) -> UBatch:
        self._used[tokens] = True
        self.n_used += ubatch.n_tokens
        self.out_ids += ubatch.batch_idxs[ubatch.output].tolist()
        return ubatch


def whole(valid: ValidBatch, n_seqs: int, *, equal_seqs: bool) -> UBatch:
    """Return all of a batch as one ubatch; its arrays serve as they are."""
    return UBatch(
        token=valid.token,
        embd=valid.embd,
        pos=valid.pos,
        seq_ids=valid.seq_ids,
        seq_first=valid.seq_first,
        seq_id_unq=valid.seq_id_unq,
        output=valid.output,
        batch_idxs=np.arange(valid.n_tokens, dtype=np.int32),
        n_seqs=n_seqs,
        equal_seqs=equal_seqs,
    )


def _check_m(m: int) -> None:
    if m < 1:
        raise ParamError(f"m, the most tokens of a ubatch, must be at least 1, got {m}")


def _spare_tails(left: I64Array, taken: int, m: int, keep_tail: int) -> tuple[int, int]:
    """Return how many sets to keep and how many tokens to take of each, so that no short tail is left behind.

    `left` counts the unused tokens of each chosen set, of which `taken` are about to be used.
    """
    rest = left - taken
    fine = (rest == 0) | (rest >= keep_tail)
    if fine[0]:
        return (len(fine) if fine.all() else int(fine.argmin())), taken
    alone = int(left[0])
    return 1, (alone if alone <= m else alone - keep_tail)


def _distinct(sets: IdSets) -> tuple[int, ...]:
    return tuple(sorted(set(chain.from_iterable(set(sets)))))
