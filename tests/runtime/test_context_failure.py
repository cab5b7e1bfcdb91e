"""Decodes that stop in the middle: what stays, what goes, and that one can go on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS, Twin, snapshot

import pykv
from pykv.errors import AllocError, ComputeCancelled, ComputeError, ParamError
from pykv.runtime import Context

TINY = TinyModel(seed=82)


@pytest.fixture(scope="module")
def model(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TINY)) as loaded:
        yield loaded


def at_ubatch(context: Context, k: int, act: Callable[[], None], *, after: bool = False) -> None:
    """Do something when ubatch `k` of the next decodes is computed, before or after the computing; once."""
    compute, runs = context._compute, 0
    run = compute.run

    def watched(*args: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == k + 1 and not after:
            act()
        run(*args)
        if runs == k + 1 and after:
            act()

    compute.run = watched


def fail(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "error",
    [ComputeError("broken"), AllocError("full"), MemoryError(), KeyboardInterrupt()],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("k", [0, 2, 4])
def test_a_failed_ubatch_leaves_the_ones_before_it(
    model: pykv.Model, k: int, error: BaseException, after: bool
) -> None:
    with model.context(n_ctx=256, n_ubatch=8, **EXACT) as context:
        twin = Twin(context, TINY)
        twin.decode(5)
        at_ubatch(context, k, fail(error), after=after)
        batch = twin.take(40)
        with pytest.raises(type(error)):
            context.decode(pykv.Batch(batch))
        context.memory.check()
        assert context.memory.pos_max(0) == 4 + 8 * k
        assert context.memory.cells().n_used == 5 + 8 * k
        with pytest.raises(ParamError, match="the last decode failed"):
            _ = context.logits
        if k:
            twin.naive.decode(batch[: 8 * k])
        twin.decode(batch[8 * k :])  # from where it stopped
        twin.decode(3)


@pytest.mark.parametrize("unified", [True, False])
def test_only_what_the_failed_ubatch_held_is_taken_out(model: pykv.Model, unified: bool) -> None:
    """Two sequences, of which the second ubatch continues only one."""
    with model.context(n_ctx=512, n_seq_max=2, kv_unified=unified, n_ubatch=6, **EXACT) as context:
        twin = Twin(context, TINY)
        twin.decode(4, seq_id=[0, 1, 0, 1])
        at_ubatch(context, 1, fail(ComputeError("broken")))
        seqs, tokens = [0, 1, 0, 1, 0, 1, 0, 0, 0], twin.take(9)
        with pytest.raises(ComputeError):
            context.decode(pykv.Batch(tokens, seq_id=seqs))
        context.memory.check()
        assert [context.memory.pos_max(s) for s in (0, 1)] == [4, 4]
        twin.naive.decode(tokens[:6], seq_ids=seqs[:6])
        twin.decode(tokens[6:], seq_id=0)
        twin.decode(2, seq_id=[0, 1])


def test_a_token_of_two_sequences_is_taken_out_of_both(model: pykv.Model) -> None:
    """llama.cpp leaves it to the second, although its key was never computed."""
    with model.context(n_ctx=256, n_seq_max=2, n_ubatch=4, **EXACT) as context:
        twin = Twin(context, TINY)
        twin.decode(4, seq_id=[(0, 1)] * 4)
        at_ubatch(context, 0, fail(ComputeError("broken")))
        with pytest.raises(ComputeError):
            context.decode(pykv.Batch(TOKENS[:4], seq_id=[(0, 1)] * 4))
        assert [context.memory.pos_max(s) for s in (0, 1)] == [3, 3]
        assert context.memory.cells().n_used == 4
        context.memory.check()
        twin.decode(2, seq_id=[0, 1])


def test_a_failure_before_the_bookkeeping_takes_nothing_out(model: pykv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled between two ubatches, an equal position stored by the first one stays."""
    with model.context(n_ctx=256, n_ubatch=2, **EXACT) as context:
        at_ubatch(context, 0, context.cancel, after=True)
        with pytest.raises(ComputeCancelled, match="before ubatch 2 of 2"):
            context.decode(pykv.Batch(TOKENS[:4], pos=[0, 1, 1, 2]))
        assert context.memory.cells().pos[:3].tolist() == [0, 1, -1]


# cancel


def test_cancel_from_another_thread_stops_in_the_middle(model: pykv.Model) -> None:
    """The flag is set while a ubatch is computed: ggml itself stops between two nodes."""
    with model.context(n_ctx=256, n_ubatch=8, **EXACT) as context:
        twin = Twin(context, TINY)

        def cancel() -> None:
            thread = threading.Thread(target=context.cancel)
            thread.start()
            thread.join()

        at_ubatch(context, 2, cancel)
        batch = twin.take(40)
        with pytest.raises(ComputeCancelled, match="the computation was cancelled"):
            context.decode(pykv.Batch(batch))
        context.memory.check()
        assert context.memory.pos_max(0) == 15
        twin.naive.decode(batch[:16])
        twin.decode(batch[16:])


def test_cancel_at_any_moment(model: pykv.Model) -> None:
    """A decode that would run for long ends soon after; the memory ends at a whole ubatch."""
    with model.context(n_ctx=2048, n_ubatch=4, **EXACT) as context:
        twin, errors = Twin(context, TINY), []

        def decode() -> None:
            try:
                context.decode(pykv.Batch(TOKENS[:1900]))
            except ComputeCancelled as error:
                errors.append(error)

        thread = threading.Thread(target=decode)
        thread.start()
        while context.n_reused < 5 and thread.is_alive():  # note: positions show the search for room too
            time.sleep(0.001)
        context.cancel()
        thread.join()
        assert len(errors) == 1
        stored = context.memory.pos_max(0) + 1
        assert stored % 4 == 0
        assert 20 <= stored < 1900
        context.memory.seq_rm(0, 40, -1)
        context.memory.check()
        twin.naive.decode(TOKENS[: min(40, stored)])
        twin.decode(TOKENS[50:53])


def test_cancel_without_a_decode_does_nothing(model: pykv.Model) -> None:
    with model.context(n_ctx=256, **EXACT) as context:
        context.cancel()
        Twin(context, TINY).decode(5)
        context.cancel()


def test_a_cancel_that_came_too_late_hit_the_next_decode(model: pykv.Model) -> None:
    """It was for the decode that was running, and that was just done."""
    with model.context(n_ctx=256, **EXACT) as context:
        twin = Twin(context, TINY)
        at_ubatch(context, 0, context.cancel, after=True)
        twin.decode(5)
        twin.decode(5)


def test_a_cancel_at_the_very_start_was_lost(model: pykv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode had begun, but not yet cleared the flag."""
    with model.context(n_ctx=256, **EXACT) as context:
        follow = context.memory.follow

        def cancelled() -> None:
            context.cancel()
            follow()

        monkeypatch.setattr(context.memory, "follow", cancelled)
        before = snapshot(context)
        with pytest.raises(ComputeCancelled):
            context.decode(pykv.Batch(TOKENS[:5]))
        assert snapshot(context) == before


# Ctrl-C

CHILD = """
import os, signal, sys
from pathlib import Path
from support.tiny_gguf import TinyModel
from support.twin import EXACT, Twin
import pykv
from pykv.errors import ComputeCancelled

TINY = TinyModel(seed=82)
how, path = sys.argv[1:]
came = []
if how == "own":
    signal.signal(signal.SIGINT, lambda *_: came.append(1))
elif how == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

with pykv.Model.load(path) as model, model.context(n_ctx=512, n_ubatch=8, **EXACT) as context:
    twin, run, n = Twin(context, TINY), context._compute.run, 0

    def interrupted(*args):
        global n
        n += 1
        if n == 4:
            os.kill(os.getpid(), signal.SIGINT)
        run(*args)

    context._compute.run = interrupted
    batch = twin.take(80)
    try:
        context.decode(pykv.Batch(batch))
        print("whole")
    except BaseException as error:
        print(type(error).__name__, type(error.__context__).__name__)
    context.memory.check()
    stored = context.memory.pos_max(0) + 1
    twin.naive.decode(batch[:stored])
    twin.decode(3)
    try:
        os.kill(os.getpid(), signal.SIGINT)  # the program's own handler is back
    except KeyboardInterrupt:
        print("again")
    print(stored, len(came))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent by number")
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("default", ["KeyboardInterrupt ComputeCancelled", "again", "24 0"]),
        ("own", ["ComputeCancelled NoneType", "24 2"]),
        ("ignored", ["whole", "80 0"]),
    ],
)
def test_ctrl_c_in_a_long_decode(write_tiny: Callable[[TinyModel], Path], how: str, expected: list[str]) -> None:
    """A real signal to a real process: it stops at once, and the context goes on from the last whole ubatch."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            CHILD,
            how,
            str(write_tiny(TINY)),
        ],  # -P: the source folder hides what is installed
        env=os.environ | {"PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == expected, done.stderr


def test_an_equal_position_of_an_earlier_ubatch_is_not_taken_out_with_a_later_one(model: pykv.Model) -> None:
    with model.context(n_ctx=256, n_ubatch=2, **EXACT) as context:
        at_ubatch(context, 1, fail(ComputeError("broken")))
        with pytest.raises(ComputeError):
            context.decode(pykv.Batch(TOKENS[:4], pos=[0, 1, 1, 2]))
        context.memory.check()
        assert context.memory.cells().n_used == 2
        assert context.memory.pos_max(0) == 1
