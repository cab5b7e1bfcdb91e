"""A memory belongs to one thread at a time: who comes second is told so, and nothing has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_gguf import TinyModel
from support.twin import EXACT, TOKENS, snapshot

import pykv
from pykv.errors import ConcurrentUseError, NoSlotError, SequenceError, UseAfterCloseError


@pytest.fixture
def context(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Context]:
    with (
        pykv.Model.load(write_tiny(TinyModel(seed=83))) as model,
        model.context(n_ctx=256, n_seq_max=2, **EXACT) as context,
    ):
        yield context


def in_another_thread(act: Callable[[], Any]) -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # handed to the test
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


VERBS: dict[str, Callable[[Any], Any]] = {
    "seq_rm": lambda memory: memory.seq_rm(0, 0, 3),
    "seq_cp": lambda memory: memory.seq_cp(0, 1),
    "seq_keep": lambda memory: memory.seq_keep(1),
    "seq_add": lambda memory: memory.seq_add(0, 0, -1, 3),
    "seq_div": lambda memory: memory.seq_div(0, 0, -1, 2),
    "clear": lambda memory: memory.clear(),
    "store_v": lambda memory: memory.store_v(transposed=not memory.store.v_trans),
    "close": lambda memory: memory.close(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_during_another_threads_decode_is_refused(
    context: pykv.Context, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    context.decode(pykv.Batch(TOKENS[:8]))
    run, seen = context._compute.run, []

    def interfere(*args: Any) -> None:
        before = snapshot(context)
        error = in_another_thread(lambda: VERBS[verb](context.memory))
        seen.append((error, snapshot(context) == before))
        run(*args)

    monkeypatch.setattr(context._compute, "run", interfere)
    context.decode(pykv.Batch(TOKENS[8:9]))
    ((error, is_unchanged),) = seen
    assert isinstance(error, ConcurrentUseError)
    assert is_unchanged
    assert context.memory.pos_max(0) == 8


@pytest.mark.parametrize("verb", VERBS)
def test_another_thread_may_follow(context: pykv.Context, verb: str) -> None:
    context.decode(pykv.Batch(TOKENS[:8]))
    assert in_another_thread(lambda: VERBS[verb](context.memory)) is None


def test_cells_are_not_shown_after_close(context: pykv.Context) -> None:
    context.memory.close()
    with pytest.raises(UseAfterCloseError):
        context.memory.cells()


def test_a_batch_larger_than_the_cache_finds_no_slot(context: pykv.Context) -> None:
    context.decode(pykv.Batch(TOKENS[:8]))
    before = snapshot(context)
    with pytest.raises(NoSlotError, match="257 tokens"):
        context.decode(pykv.Batch(TOKENS[:257]))
    assert snapshot(context) == before


def test_moves_that_cancel_out_or_are_removed_leave_nothing_to_do(context: pykv.Context) -> None:
    context.decode(pykv.Batch(TOKENS[:8]))
    context.memory.seq_add(0, 4, -1, 2)
    context.memory.seq_add(0, 4, -1, -2)
    context.decode(pykv.Batch(TOKENS[8:9]))
    context.memory.seq_add(0, 4, -1, 2)
    context.memory.seq_rm(0, 4, -1)
    context.decode(pykv.Batch(TOKENS[4:6]))
    assert context.memory.pos_max(0) == 5


@pytest.mark.parametrize("seq_id", [2, 255, -2])
def test_cells_of_a_sequence_that_no_batch_can_continue_were_lost(context: pykv.Context, seq_id: int) -> None:
    context.decode(pykv.Batch(TOKENS[:4]))
    before = snapshot(context)
    memory = context.memory
    for act in (
        lambda: memory.seq_cp(0, seq_id),
        lambda: memory.seq_cp(seq_id, 0),
        lambda: memory.seq_rm(seq_id),
        lambda: memory.seq_keep(seq_id),
        lambda: memory.seq_add(seq_id, 0, -1, 1),
        lambda: memory.seq_div(seq_id, 0, -1, 2),
    ):
        with pytest.raises(SequenceError, match=f"seq_id = {seq_id}: this cache holds sequences 0 to 1"):
            act()
    assert snapshot(context) == before
