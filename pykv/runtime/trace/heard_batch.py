"""HeardBatch: what a trace notes about a batch before it is decoded."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv.batch import Batch, BatchBuilder, BatchLimits, ValidBatch, validate
from pykv.errors import BatchError, NoSlotError, ParamError, PykvError
from pykv.runtime.trace.fingerprint import Fingerprint
from pykv.runtime.trace.held import Ranges
from pykv.runtime.trace.outcome import Outcome
from pykv.runtime.trace.step import DecodeStep
from pykv.typing import F32Array, PositionSource

_REFUSALS = (BatchError, NoSlotError, ParamError)
"""Errors that leave everything as it was, and would be raised again; all others break off what had begun."""


class HeardBatch:
    """A batch about to be decoded, as it was given and as the memory will place it."""

    def __init__(self, given: Batch, valid: ValidBatch | None, n_vocab: int) -> None:
        self._given, self._valid, self._n_vocab = given, valid, n_vocab

    @classmethod
    def of(cls, batch: object, limits: BatchLimits, memory: PositionSource) -> HeardBatch | None:
        """Look at a batch; None if it is no batch at all. Changes nothing."""
        given: Batch | None = batch if isinstance(batch, Batch) else None
        try:
            if isinstance(batch, BatchBuilder):
                given = Batch([])  # where its entries make no batch, neither do none
                given = batch.build()
            valid = None if given is None else validate(given, limits, memory)
        except PykvError:
            valid = None
        return None if given is None else cls(given, valid, limits.n_vocab)

    def step(self, result: object, ranges: Ranges, logits: F32Array | None) -> DecodeStep:
        """Return what has become of it: "ok" or the exception, the sequences afterwards, and the logits."""
        given, used = self._given, None if isinstance(result, _REFUSALS) else self._valid
        return DecodeStep(
            tokens=None if given.token is None else tuple(given.token.tolist()),
            pos=_as_given(given) if used is None else used.pos[0].tolist(),
            seqs_by_token=_listed(given) if self._valid is None else self._valid.seq_ids,
            out=tuple(np.flatnonzero(given.output).tolist()),
            outside=self._outside(),
            embd=0 if given.embd is None else given.embd.shape[1],
            outcome=Outcome.of(result),
            stored=_stored(used, ranges) if used is not None and isinstance(result, BaseException) else None,
            ranges=ranges,
            rows=() if logits is None else tuple(map(Fingerprint.of, logits)),
        )

    def _outside(self) -> tuple[int, ...]:
        token = self._given.token
        if token is None:
            return ()
        return tuple(np.flatnonzero((token < 0) | (token >= self._n_vocab)).tolist())


def _stored(batch: ValidBatch, ranges: Ranges) -> tuple[int, ...]:
    """Return which tokens of a batch the memory holds: before it, all sequences ended below its positions."""
    ends = np.array([ranges.get(int(seq), (-1, -1))[1] for seq in batch.seq_first])
    return tuple(np.flatnonzero(batch.pos[0] <= ends).tolist())


def _as_given(batch: Batch) -> Any:
    if batch.pos is None:
        return None
    return batch.pos[0].tolist() if len(batch.pos) == 1 else batch.pos.tolist()


def _listed(batch: Batch) -> tuple[tuple[int, ...], ...]:
    if isinstance(batch.seq_id, int):
        return ((batch.seq_id,),) * len(batch)
    return batch.seq_id if isinstance(batch.seq_id, tuple) else tuple((seq,) for seq in batch.seq_id.tolist())
