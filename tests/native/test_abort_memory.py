"""Memory that ggml takes for itself: where it is short the raw call ends the process, pykv's raises."""

from __future__ import annotations

import json
import signal
import textwrap
from collections.abc import Iterator

import pytest
from support.guard import DEADLY
from support.mortal import Death, Mortal

pytestmark = pytest.mark.abort

MIB = 2**20
LIMIT = """
import resource, sys
from pathlib import Path

def leave(n_bytes):
    "Let this process take so many bytes of address space more, and no more."
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + n_bytes, resource.RLIM_INFINITY))
"""
RAW_CHAIN = """
def chain(n):
    c = context(n + 1); x = tensor(c, F32, 4)
    for _ in range(n):
        x = lib.ggml_tanh(c, x)
    return graph_of(x, size=n)
"""
CHAIN = """
from pykv.errors import AllocError
from pykv.ggml import Arena, Backend, DType, Graph, Sched, cpu_device, ops

def chain(n, width=4):
    arena = Arena(n + 1, n)
    x = arena.tensor(DType.F32, (width,)).as_input()
    for i in range(n):
        x = ops.tanh(arena, x)
        if i % 100 == 99:
            x = x.as_output()
    graph = Graph(arena)
    graph.expand(x)
    return graph

backend = Backend(cpu_device(), 1)
"""


@pytest.fixture(scope="module")
def mortal() -> Iterator[Mortal]:
    with Mortal() as process:
        yield process


def run(mortal: Mortal, *parts: str) -> Death:
    return mortal.run("".join(map(textwrap.dedent, parts)))


def test_making_a_scheduler(mortal):
    raw = f"b, g = cpu(), chain(1); leave({64 * MIB}); s = schedule(b, graph_size=20_000)\n"
    death = run(mortal, LIMIT, RAW_CHAIN, raw, "lib.ggml_backend_sched_reserve(s, g)")
    assert death.signal == signal.SIGABRT, death
    assert "mem_buffer" in death.stderr
    alive = run(mortal, LIMIT, CHAIN, f"leave({64 * MIB}); Sched([backend], 10_000)")
    assert (alive.signal, alive.status) == (0, 1), alive
    assert "AllocError: no memory for a scheduler for graphs of 10000 nodes (4" in alive.stderr


@pytest.mark.parametrize(
    ("raw", "call", "what"),
    [
        ("ggml_backend_sched_reserve", "sched.reserve(graph, 'testing')", "testing: a graph of 20000 nodes"),
        ("ggml_backend_sched_alloc_graph", "sched.allocate(graph)", "a graph of 20000 nodes"),
    ],
)
def test_placing_a_graph(mortal, raw, call, what):
    made = "s = schedule(cpu(), graph_size=40_000); g = chain(20_000)\n"
    death = run(mortal, LIMIT, RAW_CHAIN, made, f"leave({4 * MIB}); lib.{raw}(s, g)")
    assert death.signal in DEADLY, death
    made = "sched = Sched([backend], 20_000); graph = chain(20_000)\n"
    alive = run(mortal, LIMIT, CHAIN, made, f"leave({4 * MIB}); {call}")
    assert (alive.signal, alive.status) == (0, 1), alive
    assert f"AllocError: no memory for {what} (" in alive.stderr


SWEEP = """
graphs = [(chain, 2, 4), (chain, 600, {width}), (chain, 1200, 8 * {width})]
backends = [Backend(cpu_device(), 1) for _ in range({n_backends})]
seen = set()
for n_mib in (2, 20, *range(50, 66, 2), 80, 110, 200):
    served = 0
    made = [chain(n, width) for chain, n, width in graphs]
    leave(n_mib * 2**20)
    try:
        with Sched(backends, 1200) as sched:
            for graph in made:
                sched.allocate(graph)
                served += 1
    except AllocError:
        pass
    leave(2**40)
    seen.add(served)
print(sorted(seen), file=sys.stderr)
"""


@pytest.mark.parametrize(("n_backends", "width"), [(1, 2**17), (1, 4), (2, 4)])
def test_no_limit_kills(mortal, n_backends, width):
    """From too little for the scheduler to enough for all graphs; wide ones need much compute memory too."""
    end = run(mortal, LIMIT, CHAIN, SWEEP.format(n_backends=n_backends, width=width))
    assert (end.signal, end.status) == (0, 0), end
    served = json.loads(end.stderr)
    assert (served[0], served[-1]) == (0, 3)
    assert width == 4 or 2 in served
