"""Python that runs in the middle of a decode or verb, in its own thread, changes nothing that this stands on.

Signal handlers, handlers of log records and trace functions run there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.child import run_cleanly
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS, Twin, snapshot

import pykv
from pykv.errors import ConcurrentUseError

TINY = TinyModel(seed=84)


@pytest.fixture
def context(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Context]:
    with (
        pykv.Model.load(write_tiny(TINY)) as model,
        model.context(n_ctx=256, n_seq_max=2, n_ubatch=8, **EXACT) as context,
    ):
        yield context


CALLS: dict[str, Callable[[pykv.Context, Path], Any]] = {
    "decode": lambda ctx, _: ctx.decode(pykv.Batch([1])),
    "observe": lambda ctx, _: ctx.observe(),
    "trace": lambda ctx, folder: ctx.trace(folder / "more.jsonl"),
    "close": lambda ctx, _: ctx.close(),
    "memory.close": lambda ctx, _: ctx.memory.close(),
    "clear": lambda ctx, _: ctx.memory.clear(),
    "seq_rm": lambda ctx, _: ctx.memory.seq_rm(0, 0, 3),
    "seq_cp": lambda ctx, _: ctx.memory.seq_cp(0, 1),
    "seq_keep": lambda ctx, _: ctx.memory.seq_keep(1),
    "seq_add": lambda ctx, _: ctx.memory.seq_add(0, 0, -1, 3),
    "seq_div": lambda ctx, _: ctx.memory.seq_div(0, 0, -1, 2),
    "store_v": lambda ctx, _: ctx.memory.store_v(not ctx.memory.store.v_trans),
    "k": lambda ctx, _: ctx.memory.k(0, 0),
    "v": lambda ctx, _: ctx.memory.v(0, 0),
    "visible": lambda ctx, _: ctx.memory.visible(0, 1),
    "check": lambda ctx, _: ctx.memory.check(),
    "dump": lambda ctx, _: ctx.memory.dump(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_from_within_a_decode_is_refused(
    context: pykv.Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    twin = Twin(context, TINY)
    twin.decode(8)
    run, n = context._compute.run, 0

    def interrupted(*args: Any) -> Any:
        nonlocal n
        n += 1
        before = snapshot(context)
        with pytest.raises(ConcurrentUseError):
            CALLS[call](context, tmp_path)
        assert snapshot(context) == before
        return run(*args)

    monkeypatch.setattr(context._compute, "run", interrupted)
    twin.decode(20)
    monkeypatch.undo()
    twin.decode(1)
    assert n == 3


@pytest.mark.parametrize("call", [call for call in CALLS if call != "decode"])
def test_a_call_from_within_a_verb_is_refused(context: pykv.Context, tmp_path: Path, call: str) -> None:
    context.decode(pykv.Batch(TOKENS[:8]))
    seen: list[type[BaseException]] = []

    def hear(*_: object) -> None:
        with pytest.raises(ConcurrentUseError, match="in use by this thread") as caught:
            CALLS[call](context, tmp_path)
        seen.append(caught.type)

    context.memory.listeners.append(hear)
    context.memory.seq_rm(0, 5, -1)
    context.memory.listeners.clear()
    assert len(seen) == 1
    context.memory.check()
    assert context.memory.pos_max(0) == 4


MADE_OF_PARTS = {
    "gemma3-4l-w16-every2": ("base", "swa"),
    "mamba2-4l": (),
    "falcon-h1-3l": ("attention", "recurrent"),
}
"""Models whose memory is no plain cache, and the names of its parts."""

READS: dict[str, Callable[[Any], Any]] = {
    "update": lambda memory: memory.update(),
    "resumable": lambda memory: memory.resumable(0, 3),
    "resume_points": lambda memory: memory.resume_points(0, 3),
    "snapshot": lambda memory: memory.snapshot(0),
    "check": lambda memory: memory.check(),
    "dump": lambda memory: memory.dump(),
}
VERBS: dict[str, Callable[[Any], Any]] = {
    "seq_rm": lambda memory: memory.seq_rm(0),
    "seq_cp": lambda memory: memory.seq_cp(0, 1),
    "seq_keep": lambda memory: memory.seq_keep(1),
    "seq_add": lambda memory: memory.seq_add(0, 0, -1, 3),
    "seq_div": lambda memory: memory.seq_div(0, 0, -1, 2),
    "clear": lambda memory: memory.clear(),
    "close": lambda memory: memory.close(),
}


@pytest.fixture(params=MADE_OF_PARTS)
def other_kind(request: pytest.FixtureRequest, write_tiny: Callable[..., Path]) -> Iterator[tuple[pykv.Context, Any]]:
    """Yield a context, and the parts of its memory."""
    path = write_tiny(BY_NAME[request.param])
    with (
        pykv.Model.load(path) as model,
        model.context(n_ctx=256, n_seq_max=2, n_ubatch=8, n_threads=1) as context,
    ):
        yield context, [getattr(context.memory, name) for name in MADE_OF_PARTS[request.param]]


def read_data(memory: Any) -> list[Callable[[], Any]]:
    """Return every read of stored rows that the memory or a part of it has."""
    reads: list[Callable[[], Any]] = []
    for il, layer in enumerate(memory.spec.layers):
        if layer.n_head_kv:
            reads += [partial(memory.k, il, 0), partial(memory.v, il, 0)]
        if layer.state is not None:
            reads += [partial(memory.r, il, 0), partial(memory.s, il, 0)]
    return reads


def calls_on(memory: Any, parts: list[Any]) -> list[Callable[[], Any]]:
    """Return all reads and verbs of a memory, and all reads of its parts."""
    on_any = [partial(read, one) for one in (memory, *parts) for read in READS.values()]
    return on_any + read_data(memory) + [partial(verb, memory) for verb in VERBS.values()]


def test_every_kind_refuses_calls_from_within_a_decode(
    other_kind: tuple[pykv.Context, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts let in whoever ran in the thread that decoded."""
    context, parts = other_kind
    context.decode(pykv.Batch(TOKENS[:8]))
    run, n = context._compute.run, 0

    def interrupted(*args: Any) -> Any:
        nonlocal n
        before = [(context.memory.pos_min(s), context.memory.pos_max(s)) for s in (0, 1)]
        for call in calls_on(context.memory, parts):
            with pytest.raises(ConcurrentUseError, match="in use by this thread"):
                call()
            n += 1
        assert [(context.memory.pos_min(s), context.memory.pos_max(s)) for s in (0, 1)] == before
        return run(*args)

    monkeypatch.setattr(context._compute, "run", interrupted)
    context.decode(pykv.Batch(TOKENS[8:28]))
    assert n == 3 * len(calls_on(context.memory, parts))
    assert context.memory.pos_max(0) == 27
    context.memory.check()


def test_every_kind_refuses_calls_from_within_a_verb(other_kind: tuple[pykv.Context, list[Any]]) -> None:
    context, parts = other_kind
    context.decode(pykv.Batch(TOKENS[:8]))
    n = 0

    def hear(*_: object) -> None:
        nonlocal n
        for call in calls_on(context.memory, parts):
            with pytest.raises(ConcurrentUseError, match="in use by this thread"):
                call()
            n += 1

    context.memory.listeners.append(hear)
    context.memory.seq_cp(0, 1)
    context.memory.listeners.clear()
    assert n == len(calls_on(context.memory, parts))
    context.memory.check()
    assert context.memory.pos_max(1) == 7


def test_keys_of_a_window_were_turned_twice_by_a_read_in_between(
    write_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler read keys of one part while the rows of another one followed a move."""
    path, keys = write_tiny(BY_NAME["gemma3-4l-w16-every2"]), []
    for is_interrupted in (False, True):
        with (
            pykv.Model.load(path) as model,
            model.context(n_ctx=256, n_seq_max=2, n_ubatch=8, n_threads=1) as context,
        ):
            memory: Any = context.memory
            context.decode(pykv.Batch(TOKENS[:12]))
            memory.seq_add(0, 0, -1, 5)
            if is_interrupted:
                interrupt_turns(memory, monkeypatch)
            memory.update()
            keys.append([memory.k(il, 0) for il in range(4)])
    for once, twice in zip(*keys, strict=True):
        np.testing.assert_array_equal(once, twice)


def interrupt_turns(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read all keys, and update, before rows are turned."""
    for part in memory.parts:

        def interrupted(*args: Any, turn: Callable[..., None] = part._mover.turn) -> None:
            for call in [partial(memory.k, il, 0) for il in range(4)] + [memory.update, memory.base.update]:
                with pytest.raises(ConcurrentUseError):
                    call()
            turn(*args)

        monkeypatch.setattr(part._mover, "turn", interrupted)


def test_open_observers_and_traces_stay_open_while_a_decode_runs(
    context: pykv.Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Closing them freed the graph that was about to run."""
    trace, observer = context.trace(tmp_path / "trace.jsonl"), context.observe()
    run = context._compute.run

    def interrupted(*args: Any) -> Any:
        for one in (observer, trace):
            with pytest.raises(ConcurrentUseError):
                one.close()
        return run(*args)

    monkeypatch.setattr(context._compute, "run", interrupted)
    context.decode(pykv.Batch(TOKENS[:8]))
    assert not observer.closed
    assert not trace.closed
    assert len(list(observer)) == trace.n_steps == 1


def test_rows_that_follow_are_not_moved_twice_by_a_call_in_between(
    context: pykv.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(context, TINY)
    twin.decode(8)
    twin.edit("seq_add", 0, 4, -1, 3)
    turn, refused = context.memory._mover.turn, []

    def interrupted(*args: Any) -> None:
        for call in (context.memory.update, lambda: context.memory.tensors(0)):
            with pytest.raises(ConcurrentUseError) as caught:
                call()
            refused.append(caught.type)
        turn(*args)

    monkeypatch.setattr(context.memory._mover, "turn", interrupted)
    twin.decode(2)
    assert len(refused) == 2


CHILD = """
import collections, signal, sys, time
from support.tiny_gguf import TinyModel
import pykv

done, observers = collections.Counter(), []

def handler(*_):
    try:
        if observers:
            observers[0].close()
            observers.clear()
        else:
            observers.append(ctx.observe())
        done["ok"] += 1
    except pykv.errors.ConcurrentUseError:
        done["refused"] += 1

with pykv.Model.load({path!r}) as model, model.context(n_ctx=512, n_threads=1, attention="fused") as ctx:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0013, 0.0013)
    i = 0
    while i < 200 or (min(done["ok"], done["refused"]) < 3 and i < 20000):
        ctx.decode(pykv.Batch([7] * (1, 3, 70, 200)[i % 4]))
        if i % 4 == 3:
            while True:
                try:
                    ctx.memory.clear()
                    break
                except pykv.errors.ConcurrentUseError:  # a handler is inside another handler
                    done["clear refused"] += 1
        i += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert min(done["ok"], done["refused"]) >= 3, done
    ctx.memory.check()
print("whole")
"""


def test_an_alarm_that_observes_killed_the_process(write_tiny: Callable[[TinyModel], Path]) -> None:
    assert run_cleanly(CHILD.format(path=str(write_tiny(TINY)))) == "whole\n"
