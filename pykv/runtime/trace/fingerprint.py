"""Fingerprint: a row of logits in a few numbers, to be compared on another machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykv.cells.arguments import shown
from pykv.typing import F32Array, I64Array, as_int, as_number

N_SAMPLES = 8


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of one row.

    Attributes
    ----------
    top : the token with the largest logit.
    values : the largest logit, the second largest, then logits at `N_SAMPLES` evenly spaced tokens.
    """

    top: int
    values: tuple[float, ...]

    @classmethod
    def of(cls, row: F32Array) -> Fingerprint:
        """Take the fingerprint of logits (n_vocab,)."""
        top = int(row.argmax())
        second = row[top] if len(row) < 2 else np.partition(row, -2)[-2]
        return cls(top, tuple(map(float, (row[top], second, *row[sampled(len(row))]))))

    def record(self) -> list[Any]:
        """Return it for JSON, which knows no NaN and no infinity."""
        return [self.top, *(_rounded(value) for value in self.values)]

    @classmethod
    def from_record(cls, record: Sequence[Any]) -> Fingerprint:
        """Return the fingerprint of a record.

        Raises
        ------
        ValueError : it is none.
        """
        if type(record) is not list or not record:
            raise ValueError(f"rows: {shown(record)} is no fingerprint of logits")
        top, values = as_int(record[0]), tuple(math.nan if value is None else as_number(value) for value in record[1:])
        if top is None or len(values) != 2 + N_SAMPLES or None in values:
            raise ValueError(f"rows: {shown(record)} is no fingerprint of logits")
        return cls(top, values)  # type: ignore[arg-type]


def sampled(n_vocab: int) -> I64Array:
    """Return the tokens whose logits are kept."""
    return np.linspace(0, n_vocab - 1, N_SAMPLES).astype(np.int64)


def _rounded(value: float) -> float | None:
    """Return as many digits as tell all float32 apart."""
    return float(f"{value:.9g}") if math.isfinite(value) else None
