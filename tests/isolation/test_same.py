"""An isolated context does, says and refuses what one in this process does."""

from __future__ import annotations

import array
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny.registry import BY_NAME
from support.twin import EXACT, TOKENS

import pykv
from pykv.batch import BatchBuilder, BatchLimits
from pykv.errors import BatchError, ParamError, PykvError
from pykv.ggml import cpu_device
from pykv.isolation import codec

Pair = tuple[pykv.Context, pykv.Context]

STEPS: tuple[tuple[Any, ...], ...] = (
    ("decode", TOKENS[:20], 0),
    ("decode", TOKENS[20:21], 0),
    ("seq_cp", 0, 1, -1, -1),
    ("seq_rm", 0, 3, 9),
    ("seq_add", 0, 9, -1, -6),
    ("decode", TOKENS[21:29], (0, 1) * 4),
    ("seq_div", 1, 4, -1, 2),
    ("seq_keep", 0),
    ("decode", TOKENS[30:33], 2),
    ("clear",),
    ("decode", TOKENS[33:37], 2),
)


def play(context: pykv.Context) -> list[Any]:
    told: list[Any] = []
    for verb, *args in STEPS:
        if verb == "decode":
            context.decode(pykv.Batch(args[0], seq_id=args[1], logits="all"))
            told.append(context.logits.tobytes())
        else:
            told.append(getattr(context.memory, verb)(*args))
        memory = context.memory
        memory.check()
        told.append((memory.dump(), memory.used, [(memory.pos_min(s), memory.pos_max(s)) for s in range(3)]))
    return told


def test_steps_give_the_same_bits(pair: Pair) -> None:
    there, local = map(play, pair)
    assert there == local


@pytest.mark.parametrize("name", ["gemma3-4l-w16-every2", "mamba-2l-wide-conv3", "jamba-3l-wide-dense"])
def test_other_memories(name: str, write_tiny: Callable[..., Path]) -> None:
    told = []
    for isolate in (True, False):
        with (
            pykv.Model.load(write_tiny(BY_NAME[name]), "CPU", isolate=isolate) as model,
            model.context(n_ctx=256, n_seq_max=2, **EXACT) as context,
        ):
            context.decode(pykv.Batch(TOKENS[:9], logits="all"))
            context.memory.seq_cp(0, 1)
            kept = context.memory.snapshot(1)
            context.decode(pykv.Batch(TOKENS[9:14], seq_id=1))
            context.memory.restore(1, kept)
            context.decode(pykv.Batch(TOKENS[20:21], seq_id=1))
            told.append(
                (
                    context.logits.tobytes(),
                    context.memory.dump(),
                    context.memory.cells().words(),
                    [run.tolist() for run in context.memory.seen(1)],
                    context.memory.resume_points(1, 9).tolist(),
                    context.memory.resumable(1, 4),
                    bytes(context.state_bytes(1, partial=True)),
                    kept.nbytes,
                    asdict(context.memory.can_shift()),
                    model.memory_plan(n_ctx=256).nbytes_per_layer,
                )
            )
    assert told[0] == told[1]


def facts(context: pykv.Context) -> dict[str, Any]:
    cells = context.memory.cells()
    return {
        "params": context.params,
        "asked": context.asked,
        "attention": context.attention,
        "path": context.attention_path,
        "sizes": (context.n_ctx, context.n_ctx_seq, context.n_batch, context.n_reused, context.compute_nbytes),
        "embedded": context.embedded,
        "memory": (context.memory.n_cells, context.memory.n_stream, context.memory.n_seq_max, context.memory.nbytes),
        "cells": [
            cells.pos.tolist(),
            cells.shift.tolist(),
            cells.token.tolist(),
            cells.n_owners.tolist(),
            cells.owners.tolist(),
            cells.sequences,
            cells.member(1).tolist(),
            cells.owners_of(3),
            cells.words(),
            (len(cells), cells.n, cells.n_used),
        ],
        "rows": [context.memory.k(1, 0).tolist(), context.memory.v(0, 1).tolist()],
        "visible": {kind: pos.tolist() for kind, pos in context.memory.visible(0, 7).items()},
        "model": (context.model.hparams, context.model.nbytes, context.model.fingerprint, context.model.placement),
        "tokens": context.model.tokenizer.encode("a text"),
        "plan": (
            context.model.memory_plan(n_ctx=512).nbytes,
            context.model.memory_plan(n_ctx=512).nbytes_per_buffer_type,
        ),
    }


def test_what_is_read_is_the_same(pair: Pair) -> None:
    for context in pair:
        context.decode(pykv.Batch(TOKENS[:12]))
        context.memory.seq_cp(0, 1, 2, 8)
    there, local = map(facts, pair)
    assert there == local


def test_devices_of_a_placement_are_those_of_this_process(isolated: pykv.Model) -> None:
    assert {id(one) for one in isolated.placement.devices} == {id(cpu_device())}
    assert isolated.placement.output.memory_free > 0


def test_cells_are_read_only_and_follow(pair: Pair) -> None:
    there, _ = pair
    cells = there.memory.cells()
    there.decode(pykv.Batch(TOKENS[:5]))
    assert cells.pos[:6].tolist() == [0, 1, 2, 3, 4, -1]
    with pytest.raises(ValueError, match="read-only"):
        cells.pos[0] = 3


def test_logits_that_were_kept_stay(pair: Pair) -> None:
    there, _ = pair
    there.decode(pykv.Batch(TOKENS[:5], logits="all"))
    first = there.logits
    before = first.copy()
    there.decode(pykv.Batch(TOKENS[5:9], logits="all"))
    assert np.array_equal(first, before)
    assert not np.array_equal(there.logits[:4], first[:4])
    assert there.logits.flags.writeable is False
    with pytest.raises(ParamError):
        there.logits_at(99)


def test_outputs_that_are_computed_in_another_order(isolated: pykv.Model, here: pykv.Model) -> None:
    params = EXACT | {"n_ctx": 512, "n_seq_max": 2, "kv_unified": False}
    rows = []
    for model in (isolated, here):
        with model.context(**params) as context:
            context.decode(pykv.Batch(TOKENS[:6], seq_id=[1, 0, 1, 0, 1, 0], logits=[True, True, False] * 2))
            rows.append((context.logits.tobytes(), context.logits_at(1).tobytes(), context.logits_at(-1).tobytes()))
    assert rows[0] == rows[1]


def test_embeddings(pair: Pair) -> None:
    """More bytes than a message holds."""
    told = []
    for context in pair:
        embd = np.random.default_rng(3).standard_normal((150, context.model.hparams.n_embd))
        assert embd.nbytes > codec.INLINE
        context.decode(pykv.Batch(None, embd=embd))
        assert context.embedded
        told.append(context.logits.tobytes())
    assert told[0] == told[1]


def test_batches_that_were_built(pair: Pair) -> None:
    told = []
    for context in pair:
        builder = BatchBuilder(BatchLimits(n_tokens_max=8, n_vocab=300, n_seq_max=3))
        for i, token in enumerate(TOKENS[:5]):
            builder.set_pos(builder.add_token(1, token), i)
        builder.set_output(2)
        context.decode(builder)
        told.append(context.logits.tobytes())
        builder.add(0)  # without content
        with pytest.raises(BatchError) as caught:
            context.decode(builder)
        told.append(str(caught.value))
    assert told[:2] == told[2:]


REFUSED: tuple[tuple[str, Callable[[pykv.Context], object]], ...] = (
    ("no batch", lambda c: c.decode([1])),  # type: ignore[arg-type]
    ("a gap", lambda c: c.decode(pykv.Batch([1], pos=[9]))),
    ("a token", lambda c: c.decode(pykv.Batch([10**6]))),
    ("an empty batch", lambda c: c.decode(pykv.Batch([]))),
    ("no room", lambda c: c.decode(pykv.Batch([1] * 256))),
    ("a sequence", lambda c: c.memory.seq_rm(7)),
    ("a word", lambda c: c.memory.seq_rm("one")),  # type: ignore[arg-type]
    ("an object", lambda c: c.memory.seq_cp(0, object)),  # type: ignore[arg-type]
    ("a half", lambda c: c.memory.seq_add(0, 0, 1, 0.5)),  # type: ignore[arg-type]
    ("a numpy bool", lambda c: c.memory.pos_max(np.True_)),  # type: ignore[arg-type]
    ("an argument", lambda c: c.memory.clear(1, 2)),  # type: ignore[call-arg]
    ("a divisor", lambda c: c.memory.seq_div(0, 0, 2, 0)),
    ("a layer", lambda c: c.memory.k(99, 0)),
    ("a stream", lambda c: c.memory.cells(3)),
    ("no snapshot", lambda c: c.memory.restore(0, 5)),  # type: ignore[arg-type]
    ("a place", lambda c: c.memory.snapshot(0, on="moon")),
    ("no file", lambda c: c.load_session("nowhere/at/all")),
    ("a damaged state", lambda c: c.load_state_bytes(b"GGUF" * 9, 0)),
    ("no bytes", lambda c: c.load_state_bytes(5, 0)),  # type: ignore[arg-type]
    ("bytes that lie apart", lambda c: c.load_state_bytes(np.zeros((4, 4))[:, ::2], 0)),
    ("bytes of nothing", lambda c: c.load_state_bytes(b"", 0)),
    ("a dialect", lambda c: c.state_bytes(0, dialect="1/2")),
    ("extra", lambda c: c.save_session("x", extra={"a": object})),
    ("attachments", lambda c: c.save_session("x", attachments={"a": 5})),  # type: ignore[dict-item]
    ("too many tokens", lambda c: c.save_sequence("x", 0, [1] * 9999)),
    ("a folder that is not there", lambda c: c.save_sequence("nowhere/at/all", 0)),
    ("layers", lambda c: c.observe([99])),
    ("a trace", lambda c: c.trace("nowhere/at/all")),
    ("a row", lambda c: c.logits_at(5)),
    ("a parameter", lambda c: c.model.context(n_ctx=-1)),
    ("another parameter", lambda c: c.model.context(colour="red")),
    ("a parameter of a plan", lambda c: c.model.memory_plan(type_k="q1")),
    ("threads", lambda c: c.model.context(n_seq_max=4, n_outputs_max=1)),
)


@pytest.mark.parametrize("attempt", [one for _, one in REFUSED], ids=[name for name, _ in REFUSED])
def test_refusals_are_the_same(pair: Pair, attempt: Callable[[pykv.Context], object]) -> None:
    told = []
    for context in pair:
        context.decode(pykv.Batch(TOKENS[:3]))
        with pytest.raises(Exception) as caught:
            attempt(context)
        error = caught.value
        assert isinstance(error, (PykvError, OSError, TypeError)), error
        told.append((type(error), _plain(error), vars(error), context.memory.dump(), context.logits.tobytes()))
    assert told[0] == told[1]


def _plain(error: BaseException) -> str:
    """Return the message without the name of the class whose method got a wrong number of arguments."""
    return str(error).replace("IsolatedMemory", "KVCache")


def test_numbers_of_other_types(pair: Pair) -> None:
    for context in pair:
        context.decode(pykv.Batch(np.array(TOKENS[:6]), seq_id=np.int64(1)))
        assert context.memory.seq_rm(np.int8(1), np.uint16(4)) is True
        assert context.memory.pos_max(np.int32(1)) == 3


def test_states_and_files(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, local = pair
    monkeypatch.chdir(tmp_path)  # relative paths mean what they mean here
    for name, context in (("there", there), ("local", local)):
        context.decode(pykv.Batch(TOKENS[:40]))
        context.save_session(name, TOKENS[:40], extra={"a": [1, {"b": None}]}, attachments={"x": b"123" * 20000})
        context.save_sequence(Path(f"{name}.seq"), 0, TOKENS[:40])
    assert Path("there").read_bytes() == Path("local").read_bytes()
    assert Path("there.pykv").read_bytes() == Path("local.pykv").read_bytes()
    assert Path("there.seq").read_bytes() == Path("local.seq").read_bytes()
    assert bytes(there.state_bytes()) == bytes(local.state_bytes())
    assert there.state_bytes(0).readonly
    expected = local.memory.k(1, 0)
    for load in (
        lambda: there.load_session("local"),
        lambda: there.load_sequence("local.seq", 1),
        lambda: there.load_state_bytes(local.state_bytes(0), 2),
    ):
        there.memory.clear()
        load()
        seq_id = next(s for s in range(3) if there.memory.pos_max(s) == 39)
        assert np.array_equal(there.memory.k(1, seq_id), expected)


@pytest.mark.parametrize("is_error", [False, True])
def test_warnings_are_given_here(pair: Pair, tmp_path: Path, is_error: bool) -> None:
    told = []
    for i, context in enumerate(pair):
        context.decode(pykv.Batch(TOKENS[:8]))
        with warnings.catch_warnings(record=not is_error) as caught:
            warnings.simplefilter("error" if is_error else "always")
            try:
                context.save_session(tmp_path / f"{i}", TOKENS[:3])
            except RuntimeWarning as warning:
                told.append((str(warning), (tmp_path / f"{i}").exists()))
        told.extend((str(one.message), one.category, one.filename) for one in caught or ())
    half = len(told) // 2
    assert half == 1
    assert told[:half] == told[half:]


def test_log_records_are_passed_on(isolated: pykv.Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pykv"), isolated.context(n_ctx=700, n_seq_max=2, kv_unified=False):
        pass
    (record,) = [one for one in caplog.records if one.name == "pykv.runtime.params"]
    assert record.getMessage() == "n_ctx=768 becomes 1024: 512 tokens for each sequence"
    assert record.levelno == logging.WARNING


def test_progress_is_told_here(path: Path) -> None:
    told: list[tuple[int, int]] = []
    with pykv.Model.load(path, "CPU", isolate=True, progress=lambda *done: told.append(done)):
        expected: list[tuple[int, int]] = []
        with pykv.Model.load(path, "CPU", isolate=False, progress=lambda *done: expected.append(done)):
            assert told == expected
            assert told


def test_what_a_progress_function_raises_comes_through(path: Path) -> None:
    class OwnError(Exception):
        pass

    def refuse(*_: int) -> None:
        raise OwnError("no")

    with pytest.raises(OwnError, match="no"):
        pykv.Model.load(path, "CPU", isolate=True, progress=refuse)


def test_observers(pair: Pair) -> None:
    told = []
    for context in pair:
        with context.observe() as observer:
            context.decode(pykv.Batch(TOKENS[:9]))
            context.decode(pykv.Batch(TOKENS[9:10]))
            first = next(iter(observer))
            context.close()
        seen = [first, *observer]
        assert observer.closed
        assert observer.layers == (0, 1)
        assert [one.stream for one in seen] == [0, 0]
        told.append([[one.mass[il].tobytes() for il in (0, 1)] + [one.pos.tolist(), one.owners(0)] for one in seen])
    assert told[0] == told[1]


def test_traces(pair: Pair, tmp_path: Path) -> None:
    for i, context in enumerate(pair):
        with context.trace(tmp_path / f"{i}") as trace:
            assert context.traces == [trace]
            context.decode(pykv.Batch(TOKENS[:9]))
            context.memory.seq_rm(0, 4, -1)
            assert trace.n_steps == 2
            assert not trace.closed
        assert trace.closed
        assert context.traces == []
        assert trace.path == tmp_path / f"{i}"
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def test_large_arrays_go_piece_by_piece(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways; the pieces of the other process have their own size."""
    monkeypatch.setattr("pykv.isolation.channel.PIECE", 5000)
    there, local = pair
    local.decode(pykv.Batch(TOKENS[:200]))
    state = local.state_bytes(0)
    assert len(state) > codec.INLINE
    there.load_state_bytes(state, 0)
    assert bytes(there.state_bytes(0)) == bytes(state)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: array.array("B", data), np.frombuffer])
def test_states_in_buffers_of_any_kind(pair: Pair, kind: Callable[..., Any], tmp_path: Path) -> None:
    there, local = pair
    local.decode(pykv.Batch(TOKENS[:30]))
    state = bytes(local.state_bytes(0))
    data = np.frombuffer(state, np.uint8) if kind is np.frombuffer else kind(state)
    there.load_state_bytes(data, 0)
    assert bytes(there.state_bytes(0)) == state
    there.save_sequence(tmp_path / "a", 0, attachments={"kept": data})
    with pykv.open_state(tmp_path / "a") as saved:
        assert bytes(saved.attachments["kept"]) == state


def test_two_contexts_and_a_snapshot_between_them(isolated: pykv.Model) -> None:
    with isolated.context(n_ctx=256, **EXACT) as one, isolated.context(n_ctx=256, **EXACT) as other:
        for context in (one, other):
            context.decode(pykv.Batch(TOKENS[:8]))
        kept = one.memory.snapshot(0)
        other.decode(pykv.Batch(TOKENS[8:12]))
        other.memory.restore(0, kept)
        assert other.memory.pos_max(0) == 7
        kept.close()
        assert kept.closed
        with pytest.raises(pykv.errors.UseAfterCloseError):
            other.memory.restore(0, kept)
