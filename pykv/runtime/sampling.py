"""Choose the next token from logits: penalties, top-k, top-p, min-p, temperature, then one draw.

The steps, their order and their meaning are those of llama.cpp's llama-sampler.cpp. Each is a function from candidates
to candidates, so a further one is a further entry of the list that `Sampler` takes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pykv.errors import ComputeError, ParamError
from pykv.typing import F32Array, as_int

_MAX_TOKEN = 2**31 - 1  # tokens are int32
_TOP_P_FIRST_LOOK = 256  # so many best ones nearly always hold the probability asked for


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; checked when made.

    Attributes
    ----------
    temperature : divides the logits; 0 takes the best token, the lowest id of equals.
    top_k : keep the k best tokens; 0 keeps all.
    top_p : keep the fewest best tokens that together have this probability; 1 keeps all.
    min_p : keep tokens with at least this share of the best one's probability; 0 keeps all.
    repetition_penalty : divides positive logits of recent tokens, multiplies negative ones; 1 does nothing.
    penalty_last_n : how many tokens are recent; 0 none, -1 all that were accepted.
    seed : makes the draws repeatable; None takes the system's entropy.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    penalty_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0:
            raise ParamError("repetition_penalty is 0, must be above 0")
        _check_integer("top_k", self.top_k, 0)
        _check_integer("penalty_last_n", self.penalty_last_n, -1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may still be chosen: logits (n,) and ids (n,), best first if `is_sorted`.

    `ids` None stands for all tokens in order, which spares a large array.
    """

    logits: F32Array
    ids: NDArray[np.intp] | None = None
    is_sorted: bool = False

    def keep(self, index: NDArray[np.intp], *, is_sorted: bool) -> Candidates:
        """Return the candidates at these places, in this order."""
        ids = index if self.ids is None else self.ids[index]
        return Candidates(self.logits[index], ids, is_sorted)

    def first(self, n: int) -> Candidates:
        """Return the first n candidates."""
        return Candidates(self.logits[:n], None if self.ids is None else self.ids[:n], self.is_sorted)

    def id_at(self, place: int) -> int:
        """Return the token at a place."""
        return place if self.ids is None else int(self.ids[place])


Filter = Callable[[Candidates], Candidates]
"""One step between the logits and the draw. It leaves at least one candidate, and its input as it was."""


class Sampler:
    """Chooses tokens one after another.

    Call `accept` with each token that enters the text, or repetition is not seen. `filters` replaces the steps between
    penalties and draw: by default `filters_of(params)`.
    """

    def __init__(self, params: SamplingParams, *, filters: Sequence[Filter] | None = None) -> None:
        self.params = params
        self._filters = filters_of(params) if filters is None else list(filters)
        self.reset()

    def reset(self) -> None:
        """Forget the accepted tokens and begin the random numbers anew."""
        self._rng = np.random.default_rng(self.params.seed)
        self._recent: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def accept(self, token: int) -> None:
        """Count a token as said: the repetition penalty sees it from now on.

        Raises
        ------
        ParamError : not an integer that a token can be.
        """
        token = _checked_token(token)
        limit = self.params.penalty_last_n
        if limit == 0:
            return
        self._recent.append(token)
        self._counts[token] += 1
        if 0 < limit < len(self._recent):
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def sample(self, logits: F32Array) -> int:
        """Return a token for logits (n_vocab,). Does not modify them and does not `accept` the token.

        Raises
        ------
        ParamError : logits of another shape or type, or fewer than an accepted token needs.
        ComputeError : NaN or +inf among them, or nothing but -inf.
        """
        _check_logits(logits)
        penalised = self._penalise(logits)
        if self.params.temperature == 0:
            return int(penalised.argmax())
        candidates = Candidates(penalised)
        for step in self._filters:
            candidates = step(candidates)
        return draw(candidates, self._rng)

    def _penalise(self, logits: F32Array) -> F32Array:
        if self.params.repetition_penalty == 1 or not self._counts:
            return logits
        seen = np.fromiter(self._counts, np.intp, len(self._counts))
        if seen.max() >= len(logits):
            raise ParamError(f"logits has {len(logits)} tokens, but token {seen.max()} was accepted")
        return penalise_repetition(logits, seen, self.params.repetition_penalty)


def filters_of(params: SamplingParams) -> list[Filter]:
    """Return the steps that some parameters ask for, in llama.cpp's order; without those that would do nothing."""
    filters: list[Filter] = []
    if params.top_k:
        filters.append(partial(keep_top_k, k=params.top_k))
    if params.top_p < 1:
        filters.append(partial(keep_top_p, p=params.top_p))
    if params.min_p > 0:
        filters.append(partial(keep_min_p, p=params.min_p))
    if params.temperature not in (0, 1):
        filters.append(partial(divide_by_temperature, temperature=params.temperature))
    return filters


def penalise_repetition(logits: F32Array, seen: NDArray[np.intp], penalty: float) -> F32Array:
    """Return logits in which the seen tokens are less likely (more likely for a penalty below 1)."""
    penalised = logits.copy()
    old = logits[seen]
    scale = np.float32(penalty)
    penalised[seen] = np.where(old <= 0, old * scale, old / scale)
    return penalised


def keep_top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the k best, best first; of equals those that stand first."""
    n = len(candidates.logits)
    if candidates.is_sorted:
        return candidates.first(k)
    if k >= n:
        return _sorted(candidates)
    logits = candidates.logits
    worst = np.partition(logits, n - k)[n - k]
    above = np.flatnonzero(logits > worst)
    equal = np.flatnonzero(logits == worst)[: k - len(above)]
    return _sorted(candidates.keep(np.concatenate((above, equal)), is_sorted=False))


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the fewest best ones whose probabilities reach p together, best first; at least one."""
    logits = candidates.logits
    total = float(np.exp(logits - logits.max()).sum(dtype=np.float64))
    size = _TOP_P_FIRST_LOOK
    while True:
        best = keep_top_k(candidates, size)
        reached = np.exp(best.logits - best.logits[0]).astype(np.float64).cumsum()
        if reached[-1] >= p * total or size >= len(logits):
            return best.first(int(np.searchsorted(reached, p * total)) + 1)
        size *= 8


def keep_min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep those with at least p times the probability of the best, in their order."""
    logits = candidates.logits
    least = logits.max() + np.float32(math.log(p))
    return candidates.keep(np.flatnonzero(logits >= least), is_sorted=candidates.is_sorted)


def divide_by_temperature(candidates: Candidates, temperature: float) -> Candidates:
    """Return the candidates with flatter (above 1) or steeper (below 1) probabilities."""
    below_best = candidates.logits - candidates.logits.max()  # the best one must not overflow
    with np.errstate(over="ignore"):
        scaled = below_best / max(np.float32(temperature), np.finfo(np.float32).tiny)
    return Candidates(scaled, candidates.ids, candidates.is_sorted)


def draw(candidates: Candidates, rng: np.random.Generator) -> int:
    """Return one candidate's id, each with the probability that softmax gives it."""
    logits = candidates.logits
    reached = np.exp(logits - logits.max()).astype(np.float64).cumsum()
    place = int(np.searchsorted(reached, rng.random() * reached[-1], side="right"))
    return candidates.id_at(min(place, len(logits) - 1))


def _sorted(candidates: Candidates) -> Candidates:
    order = np.argsort(-candidates.logits, kind="stable")
    return candidates.keep(order, is_sorted=True)


def _checked_token(token: object) -> int:
    number = as_int(token)
    if number is None or not 0 <= number <= _MAX_TOKEN:
        raise ParamError(f"token is {token!r}, must be an integer from 0 to {_MAX_TOKEN}")
    return number


def _check_logits(logits: F32Array) -> None:
    if not isinstance(logits, np.ndarray):
        raise ParamError(f"logits must be float32 of shape (n_vocab,), not {type(logits).__name__}")
    if logits.ndim != 1 or not len(logits) or logits.dtype != np.float32:
        raise ParamError(f"logits must be float32 of shape (n_vocab,), not {logits.dtype} {logits.shape}")
    best = logits.max()
    if np.isnan(best):
        raise ComputeError(f"logits are NaN, first at token {int(np.isnan(logits).argmax())}")
    if np.isinf(best):
        where = "all tokens" if best < 0 else f"token {int(logits.argmax())}"
        raise ComputeError(f"logits are {best} at {where}: no token can be chosen")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        limit = f"between {low:g} and {high:g}" if math.isfinite(high) else f"finite and at least {low:g}"
        raise ParamError(f"{name} is {value!r}, must be {limit}")


def _check_integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ParamError(f"{name} is {value!r}, must be an integer of at least {low}")
