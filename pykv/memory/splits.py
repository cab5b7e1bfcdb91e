"""How a memory cuts a batch into ubatches. Source: spec batch.md sections 4 to 6."""

from __future__ import annotations

from collections.abc import Callable

from pykv.batch import Splitter, UBatch, ValidBatch, whole


def simple(batch: ValidBatch, n_ubatch: int) -> list[UBatch] | None:
    """Return the batch as it comes, in pieces of `n_ubatch` tokens."""
    if batch.n_tokens <= n_ubatch:
        return [whole(batch, batch.n_tokens, equal_seqs=False)]  # generation: nothing to split
    return _all(batch, lambda splitter: splitter.simple(n_ubatch))


def equal(batch: ValidBatch, n_ubatch: int, *, sequential: bool, keep_tail: int = 0) -> list[UBatch] | None:
    """Return pieces of equally many tokens of several sequences; None if the batch cannot be cut so."""
    if len(batch.seq_id_unq) == 1 and batch.n_tokens <= n_ubatch:
        return [whole(batch, 1, equal_seqs=True)]  # generation: nothing to split
    return _all(batch, lambda splitter: splitter.equal(n_ubatch, sequential=sequential, keep_tail=keep_tail))


def _all(batch: ValidBatch, cut: Callable[[Splitter], UBatch | None]) -> list[UBatch] | None:
    splitter, ubatches = Splitter(batch), list[UBatch]()
    while splitter.n_used < batch.n_tokens:
        ubatch = cut(splitter)
        if ubatch is None:
            return None
        ubatches.append(ubatch)
    return ubatches
