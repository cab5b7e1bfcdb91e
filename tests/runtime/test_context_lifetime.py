"""Closing things in every order, two threads, and memory that must not grow."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.nmse import nmse
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS, Twin

import pykv
from pykv.errors import AllocError, ConcurrentUseError, UnsupportedOpError, UseAfterCloseError
from pykv.ggml import Buffer, Graph, Sched
from pykv.runtime import Context

TINY = TinyModel(seed=83)


@pytest.fixture(scope="module")
def path(write_tiny: Callable[[TinyModel], Path]) -> Path:
    return write_tiny(TINY)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[pykv.Model]:
    with pykv.Model.load(path) as loaded:
        yield loaded


BATCH = pykv.Batch(TOKENS[:5])

# order of closing


def test_a_closed_context_refuses_use(model: pykv.Model) -> None:
    context = model.context(n_ctx=256, **EXACT)
    context.decode(BATCH)
    context.close()
    context.close()
    for use in (
        lambda: context.decode(BATCH),
        lambda: context.logits,
        context.__enter__,
        lambda: context.memory.nbytes,
    ):
        with pytest.raises(UseAfterCloseError):
            use()
    for verb, args in (("seq_rm", (0,)), ("clear", ()), ("pos_max", (0,))):
        with pytest.raises(UseAfterCloseError):
            getattr(context.memory, verb)(*args)
    context.cancel()


def test_a_context_outlives_its_closed_model(path: Path) -> None:
    """It refuses to decode, nothing is freed under it, and it can still be closed."""
    model = pykv.Model.load(path)
    context = model.context(n_ctx=256, **EXACT)
    context.decode(BATCH)
    rows = context.logits
    model.close()
    with pytest.raises(UseAfterCloseError, match="the model of this context is closed"):
        context.decode(BATCH)
    with pytest.raises(UseAfterCloseError):
        _ = context.logits
    assert context.memory.pos_max(0) == 4
    context.close()
    assert np.isfinite(rows).all()


def test_a_model_outlives_its_closed_contexts(model: pykv.Model) -> None:
    for _ in range(3):
        with model.context(n_ctx=256, **EXACT) as context:
            Twin(context, TINY).decode(5)
        with pytest.raises(UseAfterCloseError, match="the context is closed"):
            context.decode(BATCH)


def test_a_model_closed_during_a_decode_of_another_thread(path: Path) -> None:
    """The graph that runs stands on the weights, so they stay; the next graph is refused."""
    model = pykv.Model.load(path)
    context = model.context(n_ctx=256, n_ubatch=2, **EXACT)
    run = context._compute.run

    def close_first(*args) -> None:
        model.close()
        run(*args)

    context._compute.run = close_first
    with pytest.raises(UseAfterCloseError):
        context.decode(pykv.Batch(TOKENS[:5], logits="all"))
    assert model.closed
    context.memory.check()
    assert context.memory.pos_max(0) == -1
    context.close()


def test_nothing_is_kept_by_a_context_that_is_dropped(model: pykv.Model) -> None:
    """No cycle: without the collector, the last reference takes everything with it."""
    gc.disable()
    try:
        context = model.context(n_ctx=256, **EXACT)
        context.decode(BATCH)
        gone = [weakref.ref(one) for one in (context, context.memory, context._compute, *context.memory.owners)]
        del context
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_a_context_that_failed_to_open_leaves_nothing(model: pykv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref] = []
    allocate = Buffer.allocate.__func__

    def watched(cls, *args) -> Buffer:
        buffer = allocate(cls, *args)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(Buffer, "allocate", classmethod(watched))
    monkeypatch.setattr(Sched, "reserve", lambda self, graph, purpose: _raise(AllocError(purpose)))
    with pytest.raises(AllocError, match="n_ubatch=256 over 256 cells"):
        model.context(n_ctx=256, **EXACT)
    gc.collect()
    assert made
    assert all(ref() is None or ref().closed for ref in made)


def _raise(error: Exception) -> None:
    raise error


def test_a_model_that_no_device_can_compute_is_refused_at_once(
    model: pykv.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizing the compute buffers used to come first, where ggml may end the process."""
    monkeypatch.setattr(Graph, "check_supported", lambda self, devices: _raise(UnsupportedOpError("no kernel")))
    monkeypatch.setattr(Sched, "reserve", lambda *args: pytest.fail("asked ggml first"))
    with pytest.raises(UnsupportedOpError):
        model.context(n_ctx=256, **EXACT)


# threads


class Paused:
    """A decode of another thread that waits in the middle."""

    def __init__(self, context: Context) -> None:
        self._context, self._run = context, context._compute.run
        self.inside, self._go = threading.Event(), threading.Event()
        context._compute.run = self._wait
        self._thread = threading.Thread(target=context.decode, args=(BATCH,))

    def _wait(self, *args) -> None:
        self.inside.set()
        self._go.wait(60)
        self._run(*args)

    def __enter__(self) -> None:
        self._thread.start()
        assert self.inside.wait(60)

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join()
        self._context._compute.run = self._run


def test_a_second_thread_is_refused(model: pykv.Model) -> None:
    context = model.context(n_ctx=256, **EXACT)
    with Paused(context):
        with pytest.raises(ConcurrentUseError, match="one thread at a time"):
            context.decode(BATCH)
        with pytest.raises(ConcurrentUseError, match=r"cancel\(\) it before close\(\)"):
            context.close()
    assert context.memory.pos_max(0) == 4
    assert context.logits.shape == (1, TINY.n_vocab)
    context.decode(BATCH)
    context.close()


def test_two_contexts_of_a_model_in_two_threads(model: pykv.Model) -> None:
    rows: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def work(i: int) -> None:
        with model.context(n_ctx=256, **EXACT) as context:
            for token in TOKENS[100 * i : 100 * i + 60]:
                context.decode(pykv.Batch([token]))
                rows[i].append(context.logits[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, found in rows.items():
        with model.context(n_ctx=256, **EXACT) as context:
            context.decode(pykv.Batch(TOKENS[100 * i : 100 * i + 60], logits="all"))
            assert nmse(found, context.logits) < 1e-8


# growth


def resident() -> int:
    """Return the bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="read from /proc")
@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_contexts_opened_again_and_again_do_not_grow_the_process(model: pykv.Model, close: bool) -> None:
    """Each holds 0.5 MB of K and V and more than that of scratch: a leak of either shows after some of them."""

    def open_one() -> None:
        context = model.context(n_ctx=512, n_batch=32, **EXACT)
        context.decode(BATCH)
        if close:
            context.close()

    for _ in range(30):
        open_one()
    gc.collect()
    before = resident()
    for _ in range(170):
        open_one()
    gc.collect()
    assert resident() - before < 30e6


def test_a_close_that_the_memory_refused_left_its_buffers_for_ever(model: pykv.Model) -> None:
    context = model.context(n_ctx=256, n_threads=1)
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with context.memory.guard:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    with pytest.raises(ConcurrentUseError, match="memory is in use"):
        context.close()
    leave.set()
    thread.join()
    context.decode(BATCH)  # nothing was closed
    context.close()
    with pytest.raises(UseAfterCloseError):
        context.memory.update()
