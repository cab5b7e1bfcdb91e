"""Decodes of models with states that fail: what is lost, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME

import pykv
from pykv.errors import AllocError, ComputeCancelled, ParamError
from pykv.ggml import Sched
from pykv.runtime.observe import Observer

TOKENS = [int(t) for t in np.random.default_rng(8).integers(0, 256, 30)]
SETTINGS = {"n_ctx": 256, "n_seq_max": 4, "n_ubatch": 32, "n_threads": 1}


@pytest.fixture(params=["mamba-4l", "jamba-4l"])
def context(request: pytest.FixtureRequest, write_tiny: Callable[[TinyFile], Path]) -> Iterator[pykv.Context]:
    """Sequences 0 to 2 hold the same ten tokens each; the state of 2 lies between those of 0 and 1."""
    with pykv.Model.load(write_tiny(BY_NAME[request.param])) as model, model.context(**SETTINGS) as context:
        for s in (0, 2, 1):
            context.decode(pykv.Batch(TOKENS[:10], seq_id=s))
        yield context


def ends(context: pykv.Context) -> list[int]:
    context.memory.check()
    return [context.memory.pos_max(s) for s in range(4)]


def next_logits(context: pykv.Context, s: int) -> np.ndarray:
    context.decode(pykv.Batch(TOKENS[10:12], seq_id=s))
    return context.logits[-1].copy()


@pytest.mark.parametrize("where", ["allocate", "compute"])
def test_a_decode_that_fails_before_computing_loses_no_state(
    context: pykv.Context, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Sequence 2 lies between the two of the batch, and would be moved."""

    def full(*_: object) -> None:
        raise AllocError("full")

    with monkeypatch.context() as patch:
        if where == "allocate":
            context._compute.drop_graph()
            patch.setattr(Sched, "allocate", full)
        else:
            patch.setattr(context._compute, "_graph_for", full)
        with pytest.raises(AllocError):
            context.decode(pykv.Batch([5, 6], seq_id=[0, 1], pos=[10, 10]))
    assert ends(context) == [9, 9, 9, -1]
    given = [next_logits(context, s) for s in range(3)]
    assert np.array_equal(given[0], given[1])
    assert np.array_equal(given[0], given[2])


def test_a_decode_that_fails_amid_computing_empties_its_sequences(
    context: pykv.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Sched.compute

    def stopped(sched: Sched, graph: object) -> None:
        compute(sched, graph)  # type: ignore[arg-type]
        raise ComputeCancelled("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Sched, "compute", stopped)
        with pytest.raises(ComputeCancelled):
            context.decode(pykv.Batch(TOKENS[:3], seq_id=0, pos=[10, 11, 12]))
    assert ends(context) == [-1, 9, 9, -1]
    assert np.array_equal(next_logits(context, 1), next_logits(context, 2))


def test_a_sequence_that_was_moved_out_of_the_way_survives_a_failure(
    context: pykv.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state lies between those of the batch; llama.cpp would go on with one that is half here, half there."""
    compute = Sched.compute

    def stopped(sched: Sched, graph: object) -> None:
        compute(sched, graph)  # type: ignore[arg-type]
        raise ComputeCancelled("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Sched, "compute", stopped)
        with pytest.raises(ComputeCancelled):
            context.decode(pykv.Batch([5, 6], seq_id=[0, 1], pos=[10, 10]))
    assert ends(context) == [-1, -1, 9, -1]
    given = next_logits(context, 2)
    context.memory.clear()
    context.decode(pykv.Batch(TOKENS[:10], seq_id=1))
    assert np.allclose(given, next_logits(context, 1), atol=1e-4)


@pytest.mark.parametrize("name", ["mamba-4l", "rwkv7-3l"])
def test_a_model_without_attention_is_not_observed(write_tiny: Callable[[TinyFile], Path], name: str) -> None:
    """The observer was made, and each decode then lost the states."""
    with pykv.Model.load(write_tiny(BY_NAME[name])) as model, model.context(**SETTINGS) as context:
        for layers in (None, [0]):
            with pytest.raises(ParamError, match="no layer has attention"):
                context.observe(layers)
        context.decode(pykv.Batch(TOKENS[:10]))
        assert context.memory.pos_max(0) == 9


def test_a_failure_in_hearing_keeps_what_was_computed(
    write_tiny: Callable[[TinyFile], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(*_: object) -> None:
        raise MemoryError

    with pykv.Model.load(write_tiny(BY_NAME["jamba-4l"])) as model, model.context(**SETTINGS) as context:
        context.decode(pykv.Batch(TOKENS[:10], seq_id=1))
        with context.observe(), monkeypatch.context() as patch:
            patch.setattr(Observer, "hear", deaf)
            with pytest.raises(MemoryError):
                context.decode(pykv.Batch(TOKENS[:10]))
        assert ends(context) == [9, 9, -1, -1]
        assert np.array_equal(next_logits(context, 0), next_logits(context, 1))
