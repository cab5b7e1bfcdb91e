"""HeardBatch: what a trace notes about a batch before it is decoded."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv.batch import Batch, BatchBuilder, BatchLimits, ValidBatch, validate
from pykv.errors import PykvError
from pykv.runtime.trace.fingerprint import Fingerprint
from pykv.runtime.trace.step import HALF_WAY, DecodeStep, Outcome, Ranges
from pykv.typing import F32Array, PositionSource


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

    def step(self, outcome: Outcome, ranges: Ranges, logits: F32Array | None) -> DecodeStep:
        """Return what has become of it."""
        given, valid = self._given, self._valid
        was_used = valid is not None and (outcome.error is None or outcome.error in HALF_WAY)
        return DecodeStep(
            tokens=None if given.token is None else tuple(given.token.tolist()),
            pos=valid.pos[0].tolist() if was_used and valid is not None else _as_given(given),
            seqs_by_token=valid.seq_ids if valid is not None else _listed(given),
            out=tuple(np.flatnonzero(given.output).tolist()),
            outside=self._outside(),
            embd=0 if given.embd is None else given.embd.shape[1],
            outcome=outcome,
            ranges=ranges,
            rows=() if logits is None else tuple(map(Fingerprint.of, logits)),
        )

    def _outside(self) -> tuple[int, ...]:
        token = self._given.token
        if token is None:
            return ()
        return tuple(np.flatnonzero((token < 0) | (token >= self._n_vocab)).tolist())


def _as_given(batch: Batch) -> Any:
    if batch.pos is None:
        return None
    return batch.pos[0].tolist() if len(batch.pos) == 1 else batch.pos.tolist()


def _listed(batch: Batch) -> tuple[tuple[int, ...], ...]:
    if isinstance(batch.seq_id, int):
        return ((batch.seq_id,),) * len(batch)
    return batch.seq_id if isinstance(batch.seq_id, tuple) else tuple((seq,) for seq in batch.seq_id.tolist())
