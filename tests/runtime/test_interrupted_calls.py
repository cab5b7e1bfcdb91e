"""Python that runs in the middle of a decode or verb, in its own thread, changes nothing that this stands on.

Signal handlers, handlers of log records and trace functions run there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.child import run_cleanly
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
