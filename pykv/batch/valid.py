"""A batch that has passed all checks, and its tokens grouped by the sets of sequences they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pykv.batch.batch import IdSets
from pykv.typing import BoolArray, F32Array, I32Array, I64Array


@dataclass(frozen=True, eq=False)
class ValidBatch:
    """What `validate` returns. All arrays are read-only.

    Attributes
    ----------
    token : (n,) ids, or None for pure embeddings.
    embd : (n, width) rows, or None.
    pos : (n_pos, n); row 0 is the sequential position. A token's one position stands in every row.
    seq_ids : per token, its sequence ids in ascending order, at least one.
    seq_first : (n,) the smallest id of each token.
    seq_id_unq : the distinct ids, ascending.
    output : (n,) whether logits are wanted.
    n_outputs : how many of them are.
    has_coupled : whether some token has several ids.
    """

    token: I32Array | None
    embd: F32Array | None
    pos: I32Array
    # differs from llama.cpp: ids ascend within a token (there: in the order of a hash set), because the first
    # one picks masks and recurrent slots and must not depend on how a library hashes
    seq_ids: IdSets
    seq_first: I32Array
    seq_id_unq: tuple[int, ...]
    output: BoolArray
    n_outputs: int
    has_coupled: bool

    @property
    def n_tokens(self) -> int:
        return len(self.seq_ids)

    @property
    def n_pos(self) -> int:
        return len(self.pos)

    @cached_property
    def groups(self) -> IdSetGroups:
        """The tokens by id-set; made when a split first asks, since the simple split never does."""
        return _coupled_groups(self) if self.has_coupled else _single_groups(self)


@dataclass(frozen=True, eq=False)
class IdSetGroups:
    """The distinct id-sets of a batch, numbered, and the tokens of each in batch order.

    Attributes
    ----------
    sets : the id-set of each number.
    of_token : (n,) the number of each token's id-set.
    tokens : (n,) indices of tokens: those of set 0 in batch order, then those of set 1, ...
    start : (n_sets + 1,) where the tokens of each set begin in `tokens`.
    """

    sets: IdSets
    of_token: I64Array
    tokens: I64Array
    start: I64Array

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Each id-set as the bits of an int, for fast tests of overlap and inclusion."""
        return tuple(sum(1 << seq for seq in ids) for ids in self.sets)

    @cached_property
    def token_list(self) -> list[int]:
        """`tokens` as a list, which `bisect` searches faster than an array."""
        return self.tokens.tolist()  # type: ignore[no-any-return]

    @cached_property
    def size(self) -> I64Array:
        """(n_sets,) how many tokens each set has."""
        return np.diff(self.start)


def _single_groups(batch: ValidBatch) -> IdSetGroups:
    unique = batch.seq_id_unq
    sets = tuple((seq,) for seq in unique)
    if len(unique) == 1:
        return _grouped(sets, np.zeros(batch.n_tokens, np.int64))
    number_of = np.zeros(unique[-1] + 1, np.int64)
    number_of[list(unique)] = np.arange(len(unique))
    return _grouped(sets, number_of[batch.seq_first])


def _coupled_groups(batch: ValidBatch) -> IdSetGroups:
    sets = tuple(dict.fromkeys(batch.seq_ids))
    number = {ids: i for i, ids in enumerate(sets)}
    return _grouped(sets, np.fromiter(map(number.__getitem__, batch.seq_ids), np.int64, batch.n_tokens))


def _grouped(sets: IdSets, of_token: I64Array) -> IdSetGroups:
    start = np.zeros(len(sets) + 1, np.int64)
    np.cumsum(np.bincount(of_token, minlength=len(sets)), out=start[1:])
    tokens = np.argsort(of_token, kind="stable")
    return IdSetGroups(sets, of_token, tokens, start)
