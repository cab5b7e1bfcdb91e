"""Holds a batch against a context's limits and memory before anything is touched.

The rules and their order are those of llama.cpp's ``llama_batch_allocr::init``; the first that fails raises.
"""

from __future__ import annotations

import numpy as np

from pykv.batch.arrays import ends, frozen
from pykv.batch.batch import Batch
from pykv.batch.builder import BatchBuilder
from pykv.batch.limits import BatchLimits
from pykv.batch.membership import membership
from pykv.batch.positions import place
from pykv.batch.valid import ValidBatch
from pykv.errors import BatchError
from pykv.log import logger
from pykv.typing import BoolArray, F32Array, I32Array, PositionSource

_log = logger(__name__)


def validate(
    batch: Batch | BatchBuilder,
    limits: BatchLimits,
    memory: PositionSource | None,
    *,
    output_all: bool = False,
) -> ValidBatch:
    """Check a batch and fill in what it leaves out.

    Does not modify the batch or the memory.

    Parameters
    ----------
    batch
        A classic batch, or a builder.
    limits
        What the context accepts.
    memory
        What is stored already, or None where nothing is (an encoder, a first batch).
    output_all
        Make every token an output, as a context that returns embeddings does.

    Raises
    ------
    BatchError
        An empty or too large batch, content that the model does not take, an id outside its range, positions
        that do not continue the stored ones. Its `seq_id`, `last` and `first` are set where one sequence is
        at fault.

    Source: batch.md 2.
    """
    if isinstance(batch, BatchBuilder):
        batch = batch.build()
    n = len(batch)
    _check_size(n, limits)
    _check_embd(batch.embd, limits)
    _check_tokens(batch.token, limits.n_vocab)
    members = membership(batch.seq_id, n, limits.n_seq_max)
    _check_sections(batch, limits.n_pos_per_embd)
    output = _all_outputs(batch.output) if output_all else batch.output
    pos = place(batch, limits, members, memory)
    return ValidBatch(
        token=batch.token,
        embd=batch.embd,
        pos=pos,
        seq_ids=members.ids,
        seq_first=members.first,
        seq_id_unq=members.unique,
        output=output,
        n_outputs=output.nonzero()[0].size,
        has_coupled=members.coupled,
    )


def _check_size(n: int, limits: BatchLimits) -> None:
    if n == 0:
        raise BatchError("the batch is empty; at least one token or embedding is needed")
    if n > limits.n_tokens_max:
        raise BatchError(f"the batch has {n} tokens, more than n_tokens_max (n_batch) = {limits.n_tokens_max}")


def _check_embd(embd: F32Array | None, limits: BatchLimits) -> None:
    if embd is not None and not limits.takes_width(embd.shape[1]):
        raise BatchError(f"embd rows are {embd.shape[1]} wide, accepted: {limits.widths()}")


def _check_tokens(token: I32Array | None, n_vocab: int) -> None:
    if token is None:
        return
    low, high = ends(token)
    if low < 0 or high >= n_vocab:
        at = int(np.flatnonzero((token < 0) | (token >= n_vocab))[0])
        raise BatchError(f"token ids must lie in [0, n_vocab = {n_vocab}), got {token[at]} at index {at}")


def _check_sections(batch: Batch, n_pos: int) -> None:
    if batch.token is None and batch.pos is not None and len(batch.pos) != n_pos:
        raise BatchError(f"pos of embeddings must have {n_pos} section(s), shape ({n_pos}, n), got {batch.pos.shape}")


def _all_outputs(output: BoolArray) -> BoolArray:
    if output.all():
        return output
    _log.warning("every token is needed as an output here; %d were not marked", np.count_nonzero(~output))
    return frozen(np.ones_like(output))
