"""Agreement: how far next-token distributions lie from those of a cold computation, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykv.typing import BoolArray, F32Array, F64Array


@dataclass(frozen=True)
class Agreement:
    """Distributions behind n tokens, held against others.

    Attributes
    ----------
    kl : (n,) Kullback-Leibler divergence of the distribution from the cold one, in nats: what a code made for the
        former costs more than needed. 0 = equal.
    same_top : (n,) whether the likeliest token is the same.
    surprise : (n - 1,) how unlikely the text's next token is, in nats, less the same for the cold one: above 0, the
        text is predicted worse.
    """

    kl: F64Array
    same_top: BoolArray
    surprise: F64Array

    @classmethod
    def of(cls, cold: F32Array, warm: F32Array, tokens: tuple[int, ...]) -> Agreement:
        """Compare logits (n, n_vocab) behind n tokens."""
        p, q = _log_softmax(cold), _log_softmax(warm)
        at = np.arange(len(tokens) - 1), np.asarray(tokens[1:], np.int64)
        kl = np.maximum(0, (np.exp(p) * (p - q)).sum(1))  # rounding may leave a little less than nothing
        return cls(kl, cold.argmax(1) == warm.argmax(1), p[at] - q[at])

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def top_1(self) -> float:
        """Share of positions at which the likeliest token is the same."""
        return float(self.same_top.mean())

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the text, divided by that of the cold computation; 1 where no token has a next one."""
        return float(np.exp(self.surprise.mean())) if len(self.surprise) else 1.0


def _log_softmax(logits: F32Array) -> F64Array:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    result: F64Array = x - np.log(np.exp(x).sum(1, keepdims=True))
    return result
