"""Owners go in any order, closed or collected, and nothing reads freed memory. In a child, so that a crash is seen."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import lifetimes
from support.child import run_cleanly
from support.worker import DeathError, Worker

from pykv.errors import UseAfterCloseError
from pykv.ggml import Arena, Backend, Buffer, CancelFlag, DType, Graph, GraphInput, Sched, cpu_device, ops
from pykv.ggml.owner import Owner

CPU = cpu_device()
DIES = Path(lifetimes.__file__).with_name("dies.py")
OWNERS = ("backend", "sched", "weights", "buffer", "arena")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(Path(lifetimes.__file__)) as worker:
        yield worker


@pytest.mark.parametrize("how", ["close", "drop"])
def test_every_order_of_the_owners(worker, how):
    for order in permutations(OWNERS):
        steps = [step for name in order for step in ([name, how], ["out", "use"], ["", "compute"], ["input", "use"])]
        assert worker.ask(steps) == "ok"


@given(
    steps=st.lists(st.tuples(st.sampled_from(lifetimes.NAMES), st.sampled_from(lifetimes.HOW)), min_size=3, max_size=24)
)
@settings(max_examples=60, deadline=None)
def test_any_order_of_closing_dropping_and_using(worker, steps):
    assert worker.ask(steps) == "ok"


def test_a_death_would_be_seen(worker):
    with pytest.raises(DeathError, match=r"exit status -11: .*Segmentation fault"), Worker(DIES) as victim:
        victim.ask(1)


# the mechanism


class Thing(Owner):
    """Owns a name in a list."""

    def __init__(self, name: str, log: list[str], *parents: Owner) -> None:
        self._own(name, log.append, *parents)


@given(
    n=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_everything_is_freed_once_and_children_before_parents(n, data):
    log: list[str] = []
    things: dict[str, Thing] = {}
    parents: dict[str, list[str]] = {}
    for i in range(n):
        chosen = data.draw(st.lists(st.sampled_from(sorted(things)), unique=True, max_size=3)) if things else []
        parents[str(i)] = chosen
        things[str(i)] = Thing(str(i), log, *(things[name] for name in chosen))
    for name in data.draw(st.permutations(sorted(things))):
        if data.draw(st.booleans()):
            things[name].close()
            things[name].close()
            assert things[name].closed
            with pytest.raises(UseAfterCloseError, match="Thing is closed"):
                _ = things[name].ptr
        del things[name]
    assert sorted(log) == sorted(parents)
    for name, above in parents.items():
        assert all(log.index(name) < log.index(parent) for parent in above)


def test_a_closed_parent_is_refused_and_the_new_child_freed():
    log: list[str] = []
    parent = Thing("parent", log)
    parent.close()
    with pytest.raises(UseAfterCloseError, match="stands on is closed"):
        Thing("child", log, parent)
    assert log == ["parent", "child"]


def test_what_is_lent_stays_until_the_user_is_gone():
    class User:
        pass

    log: list[str] = []
    thing, user = Thing("thing", log), User()
    thing.lend_to(user)
    thing.close()
    assert log == []
    del user
    assert log == ["thing"]


def test_owners_are_freed_without_the_cycle_collector():
    gc.disable()
    try:
        weights, arena = Arena(4), Arena(8, 8)
        x = weights.tensor(DType.F32, (4, 3))
        index = GraphInput(arena.tensor(DType.I32, (2,)))
        out = ops.get_rows(arena, ops.reshape(arena, x, 4, 3), index.tensor).as_output()
        graph = Graph(arena)
        graph.expand(out)
        buffer = Buffer.allocate(weights, CPU.buffer_type, "test")
        buffer.adopt(x)
        backend = Backend(CPU, 1, CancelFlag())
        sched = Sched([backend], 8, [buffer])
        sched.allocate(graph)
        index.bind()
        index.array[...] = 2
        sched.compute(graph)
        out.numpy()
        gone = [weakref.ref(one) for one in (weights, arena, buffer, backend, sched, graph, index)]
        del weights, arena, x, index, out, graph, buffer, backend, sched
        assert [ref() for ref in gone] == [None] * 7
    finally:
        gc.enable()


def test_memory_comes_back_after_close():
    out = run_cleanly("""
        import resource
        from pykv.ggml import Arena, Buffer, DType, cpu_device
        kind = cpu_device().buffer_type
        def once():
            arena = Arena(1)
            arena.tensor(DType.F32, (2**22,))
            Buffer.allocate(arena, kind, "test").close()
        once()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(20):
            once()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    assert int(out) < 20_000  # KiB; twenty buffers would be 320 MiB


def test_nothing_is_closed_at_exit_in_an_order_that_crashes():
    run_cleanly("""
        from support.lifetimes import build
        kept = build()
        import logging, sys
        logging.basicConfig(level=logging.DEBUG)
        kept["self"] = kept
    """)


def test_arrays_from_numpy_are_copies_that_outlive_everything():
    arena = Arena(1)
    x = arena.tensor(DType.F32, (4,))
    with Buffer.allocate(arena, CPU.buffer_type, "test") as buffer:
        buffer.adopt(x).set(np.arange(4, dtype=np.float32))
        kept = x.numpy()
    arena.close()
    assert kept.sum() == 6
