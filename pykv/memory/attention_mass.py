"""Attention mass: how much of the attention of some queries each cell received. What is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from pykv.cells.arguments import boolean, integer, shown
from pykv.errors import ParamError
from pykv.typing import BoolArray, F32Array

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class AttentionMass:
    """Which part of the attention to add up for each cell.

    A query's share of a cell is the softmax weight that it gives to the value there; they come to 1 over all cells.

    Attributes
    ----------
    heads : query heads that count; None = all. Stored as a tuple, ascending.
    per_kv_head : one row for each KV head, of the query heads that read it, instead of one for all.
    largest : the largest share instead of the sum.
    last : count only the last so many tokens of each sequence in a batch; None = all of its tokens. A token of several
        sequences counts, once, if it is among the last of any of them.

    Raises
    ------
    ParamError : names the field, its value and the limit.
    """

    heads: tuple[int, ...] | None = None
    per_kv_head: bool = False
    largest: bool = False
    last: int | None = None

    def __post_init__(self) -> None:
        if self.heads is not None:
            object.__setattr__(self, "heads", indices("heads", self.heads, _INT_MAX))
        for name in ("per_kv_head", "largest"):
            object.__setattr__(self, name, boolean(name, getattr(self, name)))
        if self.last is not None:
            object.__setattr__(self, "last", integer("last", self.last, 1, _INT_MAX))

    def check_heads(self, n_head: int) -> None:
        """Raise `ParamError` unless a layer of `n_head` query heads has all that are asked for."""
        if self.heads is not None and self.heads[-1] >= n_head:
            raise ParamError(f"heads: there is no head {self.heads[-1]}, the layer has heads 0 to {n_head - 1}")

    def head_weights(self, n_head: int) -> F32Array:
        """Return (n_head,) 1 for heads that count, else 0."""
        out = np.ones(n_head, np.float32) if self.heads is None else np.zeros(n_head, np.float32)
        out[[] if self.heads is None else list(self.heads)] = 1.0
        return out

    def chosen(self, seq_ids: Sequence[Sequence[int]]) -> BoolArray:
        """Return (n,) which tokens count, given the sequences of each, in their order."""
        n = len(seq_ids)
        if self.last is None or n <= self.last:
            return np.ones(n, np.bool_)
        seqs = np.fromiter(chain.from_iterable(seq_ids), np.int32)
        token = np.repeat(np.arange(n), np.fromiter(map(len, seq_ids), np.int64, n))
        order = np.argsort(seqs, kind="stable")
        in_groups = seqs[order]
        ends = np.searchsorted(in_groups, in_groups, side="right")
        is_late = ends - np.arange(seqs.size) <= self.last
        chosen = np.zeros(n, np.bool_)
        chosen[token[order[is_late]]] = True
        return chosen


@dataclass(frozen=True)
class MassWatch:
    """What a graph is to observe; part of what it is built for.

    Attributes
    ----------
    layers : whose attention.
    what : which part of it.
    n_rows : tokens of a stream that count, at most.
    """

    layers: frozenset[int]
    what: AttentionMass
    n_rows: int

    def up_to(self, n_rows: int) -> MassWatch:
        """Return a watch over at most so many rows of a stream."""
        return self if self.n_rows <= n_rows else replace(self, n_rows=n_rows)


def indices(name: str, given: object, n: int) -> tuple[int, ...]:
    """Return distinct indices below `n`, at least one, ascending.

    Raises
    ------
    ParamError : names what is wrong, and the limit.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable) or np.ndim(given) == 0:  # type: ignore[arg-type]
        raise ParamError(f"{name} = {shown(given)}: must be a sequence of integers from 0 to {n - 1}, or None")
    found = sorted({integer(name, one, 0, n - 1) for one in given})
    if not found:
        raise ParamError(f"{name} = {shown(given)}: must name at least one; None means all")
    return tuple(found)
