"""Which sequences each token of a batch belongs to."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np

from pykv.batch.arrays import ends, frozen
from pykv.batch.batch import IdSets
from pykv.errors import BatchError
from pykv.typing import MAX_SEQ, I32Array

_ALONE: IdSets = tuple((seq,) for seq in range(MAX_SEQ))


class Membership(NamedTuple):
    """The id-set of each token, seen in the ways that checks and splits need.

    Attributes
    ----------
    ids : per token, its ids in ascending order, at least one.
    first : (n,) the smallest id of each token.
    lead : (n,) the id that the caller listed first, whose positions an unplaced token continues.
    unique : the distinct ids, ascending.
    coupled : whether some token has several ids.
    """

    ids: IdSets
    first: I32Array
    lead: I32Array
    unique: tuple[int, ...]
    coupled: bool

    def pairs(self) -> tuple[I32Array, I32Array]:
        """Return (index of token, id), one pair for each id of each token, in batch order."""
        n = len(self.ids)
        if not self.coupled:
            return np.arange(n, dtype=np.int32), self.first
        counts = np.fromiter(map(len, self.ids), np.int32, n)
        tokens = np.repeat(np.arange(n, dtype=np.int32), counts)
        return tokens, np.fromiter(chain.from_iterable(self.ids), np.int32, len(tokens))


def membership(seq_id: int | I32Array | IdSets, n: int, n_seq_max: int) -> Membership:
    """Sort the ids of `n` tokens; an id outside ``[0, n_seq_max)`` or an empty set raises `BatchError`.

    note: checked before anything is indexed by an id (batch.md 1.2).
    """
    if isinstance(seq_id, tuple):
        return _coupled(seq_id, n_seq_max)
    low, high = (seq_id, seq_id) if isinstance(seq_id, int) else ends(seq_id)
    _check_range(low, high, n_seq_max)
    first = _repeated(seq_id, n) if isinstance(seq_id, int) else seq_id
    if low == high:
        return Membership((_ALONE[low],) * n, first, first, (low,), False)
    unique = np.flatnonzero(np.bincount(first, minlength=n_seq_max))
    ids = tuple(map(_ALONE.__getitem__, first.tolist()))
    return Membership(ids, first, first, tuple(unique.tolist()), False)


def _repeated(seq_id: int, n: int) -> I32Array:
    first = np.empty(n, np.int32)
    first.fill(seq_id)
    return frozen(first)


def _coupled(listed: IdSets, n_seq_max: int) -> Membership:
    distinct = dict.fromkeys(listed)
    for entry in distinct:
        if not entry:
            # differs from llama.cpp: refused, because the cell of a token without sequences is never freed
            raise BatchError(f"token {listed.index(entry)} has no sequence ids; at least one is needed")
    unique = sorted(set(chain.from_iterable(distinct)))
    _check_range(unique[0], unique[-1], n_seq_max)
    ascending = {entry: tuple(sorted(entry)) for entry in distinct}
    ids = tuple(map(ascending.__getitem__, listed))
    first, lead = (np.fromiter((entry[0] for entry in sets), np.int32, len(ids)) for sets in (ids, listed))
    return Membership(ids, frozen(first), frozen(lead), tuple(unique), any(len(entry) > 1 for entry in distinct))


def _check_range(low: int, high: int, n_seq_max: int) -> None:
    if low < 0 or high >= n_seq_max:
        culprit = low if low < 0 else high
        raise BatchError(f"seq_id must lie in [0, n_seq_max = {n_seq_max}), got {culprit}", seq_id=culprit)
