"""Cancelling a computation: from another thread, by Ctrl-C, and what stays usable."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from support.child import run_cleanly, run_python

from pykv.errors import ComputeCancelled
from pykv.ggml import Arena, Backend, CancelFlag, DType, Graph, GraphInput, HeldInterrupt, Sched, cpu_device, ops

N_NODES = 4000


def long_graph(sched: Sched, n_nodes: int = N_NODES) -> tuple[Graph, GraphInput]:
    """Return a graph of many slow nodes, allocated and filled."""
    arena = Arena(n_nodes + 2, n_nodes + 2)
    one = GraphInput(arena.tensor(DType.F32, (256, 256)))
    x = one.tensor
    for _ in range(n_nodes):
        x = ops.mul_mat(arena, x, one.tensor)
    graph = Graph(arena)
    graph.expand(x.as_output())
    sched.allocate(graph)
    one.bind()
    one.array.fill(0)
    return graph, one


@pytest.fixture
def flag() -> CancelFlag:
    return CancelFlag()


@pytest.fixture
def sched(flag):
    with Backend(cpu_device(), 1, flag) as backend, Sched([backend], N_NODES + 2) as sched:
        yield sched


def test_the_flag_is_a_flag(flag):
    assert not flag
    flag.set()
    assert flag
    flag.clear()
    assert not flag


def test_a_flag_that_is_set_stops_at_once_and_a_cleared_one_lets_go_on(sched, flag):
    graph, _ = long_graph(sched, 8)
    flag.set()
    for _ in range(2):
        with pytest.raises(ComputeCancelled):
            sched.compute(graph)
    flag.clear()
    sched.compute(graph)


def test_another_thread_stops_a_running_computation(sched, flag):
    graph, _ = long_graph(sched)
    started = threading.Event()

    def cancel() -> None:
        started.wait()
        time.sleep(0.05)
        flag.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    started.set()
    with pytest.raises(ComputeCancelled):
        sched.compute(graph)
    thread.join()
    assert flag


def test_without_a_flag_nothing_is_watched():
    with Backend(cpu_device(), 1) as backend, Sched([backend], 16) as sched:
        graph, _ = long_graph(sched, 4)
        sched.compute(graph)


def test_a_flag_outlives_its_name():
    with Backend(cpu_device(), 1, CancelFlag()) as backend, Sched([backend], 16) as sched:
        graph, _ = long_graph(sched, 4)
        _ = [CancelFlag() for _ in range(100)]
        sched.compute(graph)


# Ctrl-C

PRELUDE = """
    import os, signal, sys, threading, time
    sys.path.insert(0, {tests!r})
    from test_cancel import N_NODES, long_graph
    from pykv.errors import ComputeCancelled
    from pykv.ggml import Backend, CancelFlag, HeldInterrupt, Sched, cpu_device
    flag = CancelFlag()
    sched = Sched([Backend(cpu_device(), 1, flag)], N_NODES + 2)
    graph, _ = long_graph(sched)
    def interrupt_soon():
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
"""


def child(code: str) -> str:
    from pathlib import Path

    return PRELUDE.format(tests=str(Path(__file__).parent)) + code


def test_ctrl_c_stops_a_computation_and_is_raised_behind_the_block():
    out = run_cleanly(
        child("""
    threading.Thread(target=interrupt_soon).start()
    try:
        with HeldInterrupt(flag):
            try:
                sched.compute(graph)
                print("computed to the end")
            except ComputeCancelled:
                print("cancelled inside")
        print("not raised")
    except KeyboardInterrupt:
        print("raised behind", bool(flag))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # the handler is Python's again
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("works again")
    """)
    )
    assert out.split("\n")[:-1] == ["cancelled inside", "raised behind False", "works again"]


def test_an_ignored_ctrl_c_stays_ignored():
    out = run_cleanly(
        child("""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=interrupt_soon).start()
    with HeldInterrupt(flag):
        time.sleep(0.3)
        print("in the block", bool(flag))
    print("behind", signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
    """)
    )
    assert out.split("\n")[:-1] == ["in the block False", "behind True"]


def test_a_handler_of_the_program_runs_behind_the_block():
    out = run_cleanly(
        child("""
    signal.signal(signal.SIGINT, lambda *_: print("handled"))
    with HeldInterrupt(flag):
        os.kill(os.getpid(), signal.SIGINT)
        print("inside", bool(flag))
    print("behind")
    """)
    )
    assert out.split("\n")[:-1] == ["inside True", "handled", "behind"]


def test_the_default_action_ends_the_process_behind_the_block():
    done = run_python(
        child("""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with HeldInterrupt(flag):
        os.kill(os.getpid(), signal.SIGINT)
        print("inside", flush=True)
    print("behind", flush=True)
    """)
    )
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "inside\n"


def test_an_inner_block_leaves_ctrl_c_to_the_outer_one():
    out = run_cleanly(
        child("""
    other = CancelFlag()
    try:
        with HeldInterrupt(flag):
            with HeldInterrupt(other):
                os.kill(os.getpid(), signal.SIGINT)
            print("between", bool(flag), bool(other))
        print("not raised")
    except KeyboardInterrupt:
        print("raised")
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("works again")
    """)
    )
    assert out.split("\n")[:-1] == ["between True False", "raised", "works again"]


def test_an_error_in_the_block_passes_and_the_handler_comes_back(flag):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), HeldInterrupt(flag):
        _ = 1 // 0
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_another_thread_does_not_touch_ctrl_c(flag):
    caught: list[BaseException] = []
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with HeldInterrupt(flag):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        caught.append(error)
    leave.set()
    thread.join()
    assert len(caught) == 1
    assert not flag


def test_two_threads_compute_on_two_schedulers_and_agree():
    n, results = 64, {}
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((n, n)).astype(np.float32) / 8

    def work(name: int) -> None:
        with Backend(cpu_device(), 2 - name % 2) as backend, Sched([backend], 64) as sched:
            for _ in range(8):
                arena = Arena(32, 32)
                one = GraphInput(arena.tensor(DType.F32, (n, n)))
                x = one.tensor
                for _ in range(8):
                    x = ops.mul_mat(arena, x, one.tensor)
                graph = Graph(arena)
                graph.expand(x.as_output())
                sched.allocate(graph)
                one.bind()
                one.array[...] = weights
                sched.compute(graph)
                results.setdefault(name, []).append(x.numpy())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [array for arrays in results.values() for array in arrays]
    assert len(everything) == 24
    assert all(np.array_equal(array, everything[0]) for array in everything)
