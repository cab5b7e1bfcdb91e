"""What a replay compares, and what it cannot."""

from __future__ import annotations

from pykv.memory.kinds import attends, has_states
from pykv.models.stand_in import N_TOKENS
from pykv.runtime.context import Context
from pykv.runtime.replay.side import LiveRun, Side
from pykv.runtime.trace.header import TraceHeader

_ALWAYS = ("outcomes", "positions", "cells", "tokens", "logits")

_NO_IDS = "the trace holds no token ids"


def things(run: LiveRun) -> tuple[str, ...]:
    """Return all that can be compared, in the order in which it is."""
    spec = run.context.memory.spec
    return _ALWAYS + ("K and V",) * attends(spec) + ("states",) * has_states(spec)


def left_out(header: TraceHeader, first: LiveRun, second: Side) -> dict[str, str]:
    """Return what is not compared, and why."""
    if isinstance(second, LiveRun):
        sizes = {side.context.model.hparams.n_vocab for side in (first, second)}
        reasons = {} if len(sizes) == 1 else dict.fromkeys(("tokens", "logits"), "the vocabularies differ in size")
        if "states" in things(first) and not first.stateful:
            reasons["states"] = "a stand-in computes none"
        elif first.stateful != second.stateful:
            reasons["states"] = "the models have others"
        return reasons
    reasons = {
        "tokens": _why_no_tokens(header, first.context),
        "logits": _why_no_logits(header, first.context),
        "K and V": "a trace does not hold them",
        "states": "a trace does not hold them",
    }
    return {thing: reasons[thing] for thing in things(first) if reasons.get(thing)}


def _why_no_tokens(header: TraceHeader, context: Context) -> str:
    n_vocab = context.model.hparams.n_vocab
    if not header.has_tokens:
        return _NO_IDS
    return "" if n_vocab == N_TOKENS or n_vocab >= header.model.n_vocab else "the vocabulary here is smaller"


def _why_no_logits(header: TraceHeader, context: Context) -> str:
    hp, noted = context.model.hparams, header.model
    if not header.has_tokens:
        return _NO_IDS
    here = (hp.architecture, hp.n_vocab, hp.n_head_by_layer)
    is_same = here == (noted.architecture, noted.n_vocab, noted.shape.n_head_by_layer)
    return "" if is_same else "what computes here is not what was recorded"
