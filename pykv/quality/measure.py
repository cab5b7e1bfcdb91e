"""Measure: one cut carried out in several ways, each held against computing what is left from nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from pykv.batch import Batch
from pykv.errors import ParamError, ShiftUnsupported
from pykv.memory.kinds import has_states
from pykv.quality.cut import Cut
from pykv.quality.distance import Agreement
from pykv.quality.repair import SEQ, Choice, check_choice, deviating_runs, first_run, recompute
from pykv.runtime import Context, Model
from pykv.typing import F32Array

_NOISE_UBATCH = 32
"""Tokens at once in the computation whose rounding is compared: other sums than in one of many at once."""


@dataclass(frozen=True)
class Run:
    """One way to go on behind a cut.

    Attributes
    ----------
    name : "moved", "repaired", "rounding" or "uncut".
    share : how much of the moved tokens was computed again.
    n_recomputed : as many tokens.
    seconds : from the cut until the next token could be decoded.
    choosing_seconds : what finding the tokens took beside: all of them were computed for it.
    agreement : against the cold computation.
    """

    name: str
    share: float
    n_recomputed: int
    seconds: float
    choosing_seconds: float
    agreement: Agreement


@dataclass(frozen=True)
class QualityReport:
    """What a cut costs.

    Attributes
    ----------
    cut : what was cut.
    cold_seconds : what computing the moved tokens again took, all of them, behind those that were kept.
    runs : the ways that were tried. "rounding" is the same cold computation in other portions: what lies within its
        divergence cannot be told from noise. "uncut" has all tokens: how much the model misses what was cut.
    """

    cut: Cut
    cold_seconds: float
    runs: tuple[Run, ...]


def measure(
    model: Model,
    cut: Cut,
    repair: Sequence[float] = (0.0,),
    choose: Choice = "first",
    *,
    on_step: Callable[[int, int], None] | None = None,
    **params: Any,
) -> QualityReport:
    """Carry out a cut, with and without computing some moved tokens again, and compare with a cold computation.

    Parameters
    ----------
    repair : shares of the moved tokens that are computed again, one after the other; 0 = none, 1 = all.
    choose : which ones: "first", or those of the largest "deviation" of keys in the second layer that has some.
    on_step : called with computations done, and all there are.
    params : of the contexts, see `Model.context`; their sizes follow from the text.

    Raises
    ------
    ParamError : an argument that is none.
    ShiftUnsupported : this memory cannot move tokens; the reason says why.
    """
    shares, choose = _shares(repair), check_choice(choose)
    for name in ("n_ctx", "n_seq_max", "kv_unified"):
        if name in params:
            raise ParamError(f"{name}={params[name]!r}: follows from the text, and cannot be chosen")
    bench = _Bench(model, cut, params)
    steps = _Steps(3 + len(shares), on_step)
    cold, cold_seconds, fresh = bench.cold()
    steps.done()

    def run(
        name: str, rows: F32Array, share: float = 0.0, n: int = 0, seconds: float = 0.0, choosing: float = 0.0
    ) -> Run:
        steps.done()
        return Run(name, share, n, seconds, choosing, Agreement.of(cold, rows, cut.after))

    runs = [run("rounding", bench.in_portions()), run("uncut", bench.uncut())]
    for share in shares:
        rows, n, seconds = bench.moved(share, choose, fresh)
        choosing = cold_seconds if n and choose == "deviation" else 0.0
        runs.append(run("repaired" if n else "moved", rows, share, n, seconds, choosing))
    return QualityReport(cut, cold_seconds, tuple(runs))


class _Bench:
    """Computes a text in several ways, each in a context of its own."""

    def __init__(self, model: Model, cut: Cut, params: dict[str, Any]) -> None:
        self._model, self._cut, self._params = model, cut, params
        with self._context() as context:
            support, spec = context.memory.can_shift(), context.memory.spec
        if support.reason is not None:
            raise ShiftUnsupported(support.reason, support.detail)
        if has_states(spec):
            raise ShiftUnsupported("recurrent_state", "a state holds what is gone, wherever its tokens are moved")
        # a layer with a window may have lost some of the keys that are to be compared
        layers = [il for il, layer in enumerate(spec.layers) if layer.n_head_kv and not layer.is_swa]
        self._layer = layers[min(1, len(layers) - 1)]

    def cold(self) -> tuple[F32Array, float, F32Array]:
        """Return the rows of the cold computation, what its moved tokens took, and their keys."""
        cut = self._cut
        with self._context() as context:
            if cut.kept:
                _decode(context, cut.kept)
            since = time.perf_counter()
            _decode(context, cut.moved)
            seconds = time.perf_counter() - since
            keys = context.memory.k(self._layer, SEQ)[-len(cut.moved) :]
            return self._rows(context), seconds, keys

    def in_portions(self) -> F32Array:
        """Return the rows of the same with fewer tokens at once."""
        with self._context(n_ubatch=_NOISE_UBATCH) as context:
            _decode(context, (*self._cut.kept, *self._cut.moved))
            return self._rows(context)

    def uncut(self) -> F32Array:
        """Return the rows behind all tokens."""
        with self._context() as context:
            _decode(context, self._cut.stored)
            return self._rows(context)

    def moved(self, share: float, choose: Choice, fresh: F32Array) -> tuple[F32Array, int, float]:
        """Return the rows behind moved tokens, how many were computed again, and what all that took."""
        cut, at = self._cut, self._cut.start
        with self._context() as context:
            _decode(context, cut.stored)
            memory = context.memory
            since = time.perf_counter()
            memory.seq_rm(SEQ, cut.start, cut.end)
            memory.seq_add(SEQ, cut.end, -1, cut.start - cut.end)
            memory.update()
            if choose == "first":
                runs = first_run(at, len(cut.moved), share)
            else:
                runs = deviating_runs(at, memory.k(self._layer, SEQ)[-len(cut.moved) :], fresh, share)
            n = recompute(context, (*cut.kept, *cut.moved), runs)
            seconds = time.perf_counter() - since
            return self._rows(context), n, seconds

    def _rows(self, context: Context) -> F32Array:
        """Return the logits behind each token that follows the cut."""
        rows = [_decode(context, self._cut.after[i : i + 1], "all") for i in range(len(self._cut.after))]
        return np.concatenate(rows)

    @contextmanager
    def _context(self, **more: Any) -> Iterator[Context]:
        n_ctx = len(self._cut.stored) + len(self._cut.after)
        with self._model.context(**{**self._params, **more}, n_ctx=n_ctx, n_seq_max=2, kv_unified=True) as context:
            yield context


def _decode(context: Context, tokens: Sequence[int], logits: str = "none") -> F32Array:
    for at in range(0, len(tokens), context.n_batch):
        context.decode(Batch(tokens[at : at + context.n_batch], logits=logits))
    return context.logits.copy()


def _shares(repair: object) -> tuple[float, ...]:
    given = tuple(repair) if isinstance(repair, Sequence) and not isinstance(repair, str) else None
    if not given or not all(isinstance(one, Real) and 0 <= float(one) <= 1 for one in given):
        raise ParamError(f"repair={repair!r} must be shares from 0 to 1")
    return tuple(float(one) for one in given)


class _Steps:
    """Counts what is done."""

    def __init__(self, n: int, on_step: Callable[[int, int], None] | None) -> None:
        self._n, self._on_step, self._done = n, on_step, 0

    def done(self) -> None:
        self._done += 1
        if self._on_step is not None:
            self._on_step(self._done, self._n)
