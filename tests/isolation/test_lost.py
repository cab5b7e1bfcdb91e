"""The process of a model ends, is ended, hangs, or is outlived: this one goes on, and nothing is left over."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.child import child_environment, python_command, run_cleanly
from support.twin import EXACT, TOKENS

import pykv
from pykv.errors import BackendLost, ConcurrentUseError, UseAfterCloseError

LONG = pykv.Batch(TOKENS[:200])


@pytest.fixture
def model(path: Path) -> Iterator[pykv.Model]:
    with pykv.Model.load(path, "CPU", isolate=True) as loaded:
        yield loaded


def pid_of(model: pykv.Model) -> int:
    return model.link.pid  # type: ignore[attr-defined, no-any-return]


def is_gone(pid: int) -> bool:
    """Return whether a child of ours is gone, not even a zombie left."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(so: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process hang."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if not is_gone(pid):
            os.kill(pid, signal.SIGCONT)


def later(act: Callable[[], object], seconds: float = 0.3) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_it_is_killed_between_calls(model: pykv.Model) -> None:
    context = model.context(n_ctx=256, **EXACT)
    context.decode(LONG)
    state = context.state_bytes(0)
    rows = context.logits
    os.kill(pid_of(model), signal.SIGKILL)
    with pytest.raises(BackendLost, match=r"the process that computed on CPU has ended \(SIGKILL\)") as caught:
        context.decode(pykv.Batch([1]))
    assert caught.value.devices == ("CPU",)
    assert isinstance(caught.value, ConnectionError)
    assert is_gone(pid_of(model))
    assert model.closed
    for use in (
        lambda: context.decode(LONG),
        lambda: context.logits,
        lambda: context.memory.pos_max(0),
        context.memory.clear,
        context.state_bytes,
        model.context,
        model.memory_plan,
        context.__enter__,
    ):
        with pytest.raises(BackendLost, match="Load the model anew"):
            use()
    context.cancel()
    context.close()
    model.close()
    with pytest.raises(UseAfterCloseError, match="the model is closed"):
        model.context()
    with pytest.raises(UseAfterCloseError, match="the context is closed"):
        context.decode(LONG)
    assert rows.any()
    assert len(state) > 1000


def test_it_is_killed_amid_a_decode(model: pykv.Model) -> None:
    context = model.context(n_ctx=256, **EXACT)
    pid = pid_of(model)
    with stopped(pid):  # so that the decode is under way when it is killed
        timer = later(lambda: os.kill(pid, signal.SIGKILL))
        with pytest.raises(BackendLost, match="SIGKILL"):
            context.decode(LONG)
        timer.join()
    assert is_gone(pid)


def test_it_is_killed_while_the_model_is_loaded(path: Path) -> None:
    children = set(children_of(os.getpid()))

    def kill(*_: int) -> None:
        (child,) = set(children_of(os.getpid())) - children
        os.kill(child, signal.SIGKILL)

    with pytest.raises(BackendLost, match="SIGKILL"):
        pykv.Model.load(path, "CPU", isolate=True, progress=kill)
    assert set(children_of(os.getpid())) == children


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_program_that_is_killed_takes_it_along(path: Path, tmp_path: Path) -> None:
    """Also where a process that was forked off still holds the sockets."""
    program = f"""if True:
        import os, time, pykv
        model = pykv.Model.load({str(path)!r}, "CPU", isolate=True)
        if os.fork():
            print(model.link.pid, flush=True)
        time.sleep(60)
        """
    process = subprocess.Popen(
        python_command("-W", "ignore", "-c", program),
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not is_gone(pid)
        process.kill()
        process.wait()
        wait_until(lambda: is_gone(pid) or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_nothing_is_left_over(path: Path) -> None:
    fds, children = len(os.listdir("/proc/self/fd")), children_of(os.getpid())
    shared = sorted(os.listdir("/dev/shm"))
    for how in ("close", "collect", "kill"):
        model = pykv.Model.load(path, "CPU", isolate=True)
        context = model.context(n_ctx=256, **EXACT)
        context.decode(LONG)
        pid = pid_of(model)
        if how == "close":
            model.close()
        elif how == "kill":
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(BackendLost):
                context.memory.check()
        del model, context
        gc.collect()
        assert is_gone(pid), how
    assert len(os.listdir("/proc/self/fd")) == fds
    assert children_of(os.getpid()) == children
    assert sorted(os.listdir("/dev/shm")) == shared


def test_a_program_that_ends_without_closing(path: Path) -> None:
    pid = run_cleanly(
        f"""
        import pykv
        model = pykv.Model.load({str(path)!r}, "CPU", isolate=True)
        context = model.context(n_ctx=256)
        context.decode(pykv.Batch([1, 2]))
        print(model.link.pid)
        """
    )
    assert is_gone(int(pid))


@pytest.mark.parametrize("how", ["prompt", "command", "a folder that is gone"])
def test_programs_without_a_file(path: Path, tmp_path: Path, how: str) -> None:
    """No ``__main__`` is imported anew, and no module out of the folder."""
    (tmp_path / "socket.py").write_text("raise SystemExit('this is the wrong module')")
    code = (
        f"import pykv; m = pykv.Model.load({str(path)!r}, 'CPU', isolate=True); c = m.context(n_ctx=256); "
        "c.decode(pykv.Batch([1])); print(c.logits.shape)\n"
    )
    if how == "a folder that is gone":
        code = f"import os; os.chdir({str(tmp_path)!r}); os.unlink('socket.py'); os.rmdir({str(tmp_path)!r}); {code}"
    command = python_command("-q", "-i") if how == "prompt" else python_command("-c", code)
    done = subprocess.run(
        command,
        input=code if how == "prompt" else "",
        cwd=None if how == "a folder that is gone" else tmp_path,
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=60,
        check=False,
    )
    assert "(1, " in done.stdout, done.stderr


# Ctrl-C


def interrupted(path: Path, body: str) -> subprocess.Popen[str]:
    """Start a program whose model's process hangs when it says so."""
    program = f"""
import os, signal, sys, threading, time, pykv
from pykv.errors import BackendLost, ComputeCancelled
model = pykv.Model.load({str(path)!r}, "CPU", isolate=True)
context = model.context(n_ctx=256, n_threads=1)
pid = model.link.pid
def press(*seconds):
    def run():
        for each in seconds:
            time.sleep(each)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=run, daemon=True).start()
{body}
"""
    return subprocess.run(
        python_command("-c", program), capture_output=True, text=True, env=child_environment(), timeout=120, check=False
    )


def test_the_first_ctrl_c_stops_a_decode(path: Path) -> None:
    """It reaches a process that has just been busy with something else."""
    done = interrupted(
        path,
        """
os.kill(pid, signal.SIGSTOP)
threading.Timer(0.6, lambda: os.kill(pid, signal.SIGCONT)).start()
press(0.2)
try:
    context.decode(pykv.Batch([1] * 200))
except KeyboardInterrupt as error:
    print("interrupted", type(error.__context__).__name__)
print(context.memory.pos_max(0), model.closed)
context.decode(pykv.Batch([1] * 5))
print(context.memory.pos_max(0))
""",
    )
    assert done.stdout.split() == ["interrupted", "ComputeCancelled", "-1", "False", "4"], done.stderr


def test_a_second_ctrl_c_ends_a_process_that_hangs(path: Path) -> None:
    done = interrupted(
        path,
        """
os.kill(pid, signal.SIGSTOP)
press(0.2, 0.3)
try:
    context.decode(pykv.Batch([1] * 200))
except KeyboardInterrupt as error:
    print("interrupted", type(error.__context__).__name__)
try:
    context.decode(pykv.Batch([1]))
except BackendLost as error:
    print("lost", model.closed)
""",
    )
    assert done.stdout.split() == ["interrupted", "BackendLost", "lost", "True"], done.stderr


def test_a_handler_of_ones_own_hears_it_afterwards(path: Path) -> None:
    done = interrupted(
        path,
        """
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(context.memory.pos_max(0)))
os.kill(pid, signal.SIGSTOP)
threading.Timer(0.5, lambda: os.kill(pid, signal.SIGCONT)).start()
press(0.2)
try:
    context.decode(pykv.Batch([1] * 200))
except ComputeCancelled:
    print("cancelled", heard)
""",
    )
    assert done.stdout.split() == ["cancelled", "[-1]"], done.stderr


def test_a_handler_that_raises_gets_its_way(path: Path) -> None:
    """Another signal's: what hangs is ended, so that the next call does not read an old reply."""
    done = interrupted(
        path,
        """
import pykv.isolation.link as link
link._SETTLE = 0.3
class TooLong(Exception): pass
def give_up(*_): raise TooLong
signal.signal(signal.SIGALRM, give_up)
for hangs in (False, True):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    os.kill(pid, signal.SIGSTOP)
    if not hangs:
        threading.Timer(0.3, lambda: os.kill(pid, signal.SIGCONT)).start()
    try:
        context.decode(pykv.Batch([1] * 20))
    except TooLong:
        print(model.closed)
    if not hangs:
        context.memory.clear()
        context.decode(pykv.Batch([1, 2, 3]))
        print(context.memory.pos_max(0), context.logits.shape[0])
""",
    )
    assert done.stdout.split() == ["False", "2", "1", "True"], done.stderr


def test_ctrl_c_while_the_model_is_loaded(path: Path) -> None:
    done = run_cleanly(
        f"""
        import os, signal, pykv
        try:
            pykv.Model.load({str(path)!r}, "CPU", isolate=True,
                            progress=lambda *_: os.kill(os.getpid(), signal.SIGINT))
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    assert done.split() == ["interrupted"]


# threads


def test_cancel_from_another_thread(model: pykv.Model) -> None:
    context = model.context(n_ctx=256, **EXACT)
    pid = pid_of(model)
    with stopped(pid):
        first = later(context.cancel, 0.2)
        second = later(lambda: os.kill(pid, signal.SIGCONT), 0.4)
        with pytest.raises(pykv.errors.ComputeCancelled):
            context.decode(LONG)
        first.join()
        second.join()
    assert context.memory.pos_max(0) == -1
    context.cancel()  # nothing runs
    context.decode(LONG)


def test_one_call_at_a_time(model: pykv.Model) -> None:
    context, other = (model.context(n_ctx=256, **EXACT) for _ in range(2))
    pid = pid_of(model)
    with stopped(pid):
        thread = threading.Thread(target=context.decode, args=(LONG,))
        thread.start()
        wait_until(lambda: context._decodes)
        for use in (
            lambda: context.decode(LONG),
            context.memory.clear,
            lambda: context.state_bytes(0),
            context.close,
            model.close,
        ):
            with pytest.raises(ConcurrentUseError):
                use()
        os.kill(pid, signal.SIGCONT)
        other.decode(LONG)  # waits for its turn
        thread.join()
    assert context.memory.pos_max(0) == other.memory.pos_max(0) == 199


def test_threads_with_a_context_each(model: pykv.Model) -> None:
    rows: dict[int, bytes] = {}

    def work(i: int) -> None:
        with model.context(n_ctx=256, **EXACT) as context:
            for token in TOKENS[i : i + 20]:
                context.decode(pykv.Batch([token]))
            rows[i] = context.logits.tobytes()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = dict(rows)
    rows.clear()
    for i in range(3):
        work(i)
    assert rows == expected


def test_a_forked_process_has_no_part_in_it(path: Path) -> None:
    told = run_cleanly(
        f"""
        import os, pykv
        from pykv.errors import ConcurrentUseError
        model = pykv.Model.load({str(path)!r}, "CPU", isolate=True)
        context = model.context(n_ctx=256)
        if not os.fork():
            try:
                context.decode(pykv.Batch([1]))
            except ConcurrentUseError as error:
                print("refused", flush=True)
            del model, context
            raise SystemExit
        os.wait()
        context.decode(pykv.Batch([1]))
        print("goes on")
        """
    )
    assert told.split() == ["refused", "goes", "on"]


@pytest.mark.parametrize("isolate", ["yes", 1, None])
def test_what_isolate_may_be(path: Path, isolate: object) -> None:
    with pytest.raises(pykv.errors.ParamError, match=f"isolate={isolate!r} must be True, False or 'auto'"):
        pykv.Model.load(path, "CPU", isolate=isolate)  # type: ignore[arg-type]


def test_a_python_that_cannot_be_started(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(pykv.errors.ParamError, match="isolate=True: needs a Python that can be started anew"):
        pykv.Model.load(path, "CPU", isolate=True)


@pytest.mark.parametrize("devices", ["nowhere", ["CPU", 5], 5, []])
def test_devices_that_are_none_are_refused_as_ever(path: Path, devices: object) -> None:
    told = []
    for isolate in (True, False):
        with pytest.raises(pykv.errors.ParamError) as caught:
            pykv.Model.load(path, devices, isolate=isolate)  # type: ignore[arg-type]
        told.append(str(caught.value))
    if devices == 5:
        assert told[0] == "devices: 5 must be the name of a device, such as 'CUDA0'"
    else:
        assert told[0] == told[1]
