"""A trace holds what a context was told and what came of it, and never gets in its way."""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stand_in import LAYER, SHAPE, open_stand_in
from support.state_io import load, saved

import pykv
from pykv.batch import BatchBuilder, BatchLimits
from pykv.errors import (
    BatchError,
    ComputeCancelled,
    ConcurrentUseError,
    NoSlotError,
    ParamError,
    StateError,
    TraceError,
    UseAfterCloseError,
)
from pykv.runtime import Context
from pykv.runtime.trace.file import read_trace
from pykv.runtime.trace.held import _hashes
from pykv.runtime.trace.outcome import Outcome
from pykv.runtime.trace.step import DecodeStep, VerbStep

EACH = {"0": 1, "1": 2, "2": 3}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_steps_are_recorded_with_what_came_of_them(path):
    with open_stand_in(n_seq_max=3) as context, context.trace(path):
        context.decode(pykv.Batch([5, 7, 9], seq_id=[0, 0, 1], logits="none"))
        context.memory.seq_cp(0, 2)
        context.decode(pykv.Batch([4, 4], seq_id=[(0, 2), 1], logits="none"))
        context.memory.seq_rm(0, np.int64(1))
        context.memory.seq_add(1, 0, -1, 3)
        context.memory.seq_div(1, p0=0, p1=-1, d=2)
        context.memory.seq_keep(2)
        context.memory.clear()
    steps = lines(path)[1:]
    cells = [{seq: one[0] for seq, one in step.pop("cells").items()} for step in steps]
    assert cells == [{"0": 2, "1": 1}, {"0": 2, "2": 2}, {"0": 3, "1": 2, "2": 3}, {"0": 1}, *[EACH] * 2, {"2": 3}, {}]
    assert steps == [
        {
            "do": "decode",
            "tokens": [5, 7, 9],
            "pos": [0, 1, 0],
            "seq": [[0], [0], [1]],
            "out": [],
            "outcome": "ok",
            "seen": {"0": [0, 1], "1": [0, 0]},
        },
        {"do": "seq_cp", "args": [0, 2, -1, -1], "outcome": None, "seen": {"0": [0, 1], "1": [0, 0], "2": [0, 1]}},
        {
            "do": "decode",
            "tokens": [4, 4],
            "pos": [2, 1],
            "seq": [[0, 2], [1]],
            "out": [],
            "outcome": "ok",
            "seen": {"0": [0, 2], "1": [0, 1], "2": [0, 2]},
        },
        {"do": "seq_rm", "args": [0, 1, -1], "outcome": True, "seen": {"0": [0, 0], "1": [0, 1], "2": [0, 2]}},
        {"do": "seq_add", "args": [1, 0, -1, 3], "outcome": None, "seen": {"0": [0, 0], "1": [3, 4], "2": [0, 2]}},
        {"do": "seq_div", "args": [1, 0, -1, 2], "outcome": None, "seen": {"0": [0, 0], "1": [1, 2], "2": [0, 2]}},
        {"do": "seq_keep", "args": [2], "outcome": None, "seen": {"2": [0, 2]}},
        {"do": "clear", "args": [True], "outcome": None, "seen": {}},
    ]


def test_logits_are_kept_as_fingerprints(path):
    with open_stand_in() as context, context.trace(path):
        context.decode(pykv.Batch([5, 7, 9], logits=[True, False, True]))
        rows = context.logits
    record = lines(path)[1]
    assert record["out"] == [0, 2]
    sampled = [0, 35, 71, 107, 142, 178, 214, 250]  # eight of 251, evenly spaced
    for row, kept in zip(rows, record["rows"], strict=True):
        ordered = np.sort(row)
        assert kept[0] == row.argmax()
        assert np.allclose(kept[1:], [ordered[-1], ordered[-2], *row[sampled]], rtol=1e-7)


def test_refused_batches_are_recorded_as_given(path):
    with open_stand_in(n_seq_max=2, n_batch=8) as context, context.trace(path):
        for batch in (
            pykv.Batch([300]),
            pykv.Batch([1, 2], pos=[4, 9], seq_id=[0, (0, 1)]),
            pykv.Batch([1] * 9, seq_id=1),
            pykv.Batch([]),
            pykv.Batch(None, embd=[[0.0] * 4] * 2, seq_id=[0, 1]),
        ):
            with pytest.raises(BatchError):
                context.decode(batch)
    steps = lines(path)[1:]
    assert [step["tokens"] for step in steps] == [[300], [1, 2], [1] * 9, [], None]
    assert [step["pos"] for step in steps] == [None, [4, 9], None, None, None]
    assert [step["seq"] for step in steps] == [[[0]], [[0], [0, 1]], [[1]] * 9, [], [[0], [1]]]
    assert {step["outcome"]["error"] for step in steps} == {"BatchError"}
    assert steps[0]["outcome"]["message"].startswith("token ids must lie in")
    assert steps[4]["embd"] == 4


def test_builder_is_recorded_as_the_batch_it_makes(path):
    limits = BatchLimits(n_tokens_max=8, n_vocab=251, n_seq_max=2)
    builder = BatchBuilder(limits)
    builder.add_token(0, 11)
    unfinished = BatchBuilder(limits)
    unfinished.add(0)
    with open_stand_in(n_seq_max=2) as context, context.trace(path):
        context.decode(builder)
        with pytest.raises(BatchError):
            context.decode(unfinished)
        with pytest.raises(ParamError):
            context.decode([1, 2])  # no batch at all: not recorded
    steps = lines(path)[1:]
    assert [step["tokens"] for step in steps] == [[11], []]
    assert [step["pos"] for step in steps] == [[0], None]


def test_refused_verbs_are_recorded(path):
    with open_stand_in() as context, context.trace(path):
        for args in ((7,), (0, "start")):
            with pytest.raises((ValueError, TypeError)):
                context.memory.seq_rm(*args)
    steps = lines(path)[1:]
    assert steps[0]["args"] == [7, -1, -1]
    assert steps[0]["outcome"]["error"] == "SequenceError"
    assert steps[1]["args"] == [0, {"repr": "'start'"}, -1]


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __bool__(self) -> bool:
        return True


def test_what_cannot_be_written_down_changed_what_a_verb_does(path):
    with open_stand_in() as context, context.trace(path):
        context.decode(pykv.Batch([5, 7, 9, 4]))
        assert context.memory.seq_rm(0, 2, 10**5000)
        with pytest.raises(ParamError):
            context.memory.clear(Unspeakable())
        with pytest.raises(ParamError):
            context.memory.seq_add(0, 0, -1, Unspeakable())
    read = read_trace(path)
    assert [str(step.outcome).split(":")[0] for step in read.steps] == ["ok", "True", "ParamError", "ParamError"]
    assert [step.args for step in read.steps[1:]] == [
        (0, 2, {"repr": "some int"}),
        ({"repr": "some Unspeakable"},),
        (0, 0, -1, {"repr": "some Unspeakable"}),
    ]


def test_tokens_that_were_to_stay_private_showed_in_logits_and_messages(path):
    with open_stand_in() as context, context.trace(path, tokens=False):
        context.decode(pykv.Batch([5, 7], logits="all"))
        with pytest.raises(BatchError, match="314159"):
            context.decode(pykv.Batch([5, 314159, -2]))
    header, first, second = lines(path)
    assert header["tokens"] is False
    assert first["tokens"] is None
    assert "rows" not in first
    assert len(first["cells"]["0"]) == 2  # no hash of tokens
    assert second["tokens"] is None
    assert second["outside"] == [1, 2]
    assert second["outcome"] == {"error": "BatchError", "message": "the vocabulary lacks a token"}
    assert "314159" not in path.read_text()


@pytest.mark.parametrize("tokens", ["no", 0, None])
def test_tokens_that_is_no_bool_recorded_them(path, tokens):
    with open_stand_in() as context, pytest.raises(ParamError, match=r"tokens = .*: must be True or False"):
        context.trace(path, tokens=tokens)
    assert not path.exists()


def test_a_trace_of_a_memory_in_use_was_told_only_at_replay(path):
    with open_stand_in() as context:
        context.decode(pykv.Batch([1, 2, 3]))
        with pytest.raises(TraceError, match=r"holds sequence 0 at 0\.\.2.*start the trace before the first decode"):
            context.trace(path)
        assert not path.exists()
        context.memory.clear()
        with context.trace(path):
            context.decode(pykv.Batch([4]))
    assert len(read_trace(path).steps) == 1


def test_two_traces_on_one_path_corrupted_it(path):
    (path.parent / "link").symlink_to(path)
    with open_stand_in() as context, open_stand_in() as other, context.trace(path) as trace:
        for same in (path, path.parent / "link", str(path.parent / "." / path.name)):
            for one in (context, other):
                with pytest.raises(TraceError, match="another trace is being written there"):
                    one.trace(same)
        context.decode(pykv.Batch([1]))
        trace.close()
        assert len(lines(path)) == 2
        other.trace(path)  # closed, it is in nobody's way


@pytest.mark.parametrize("bad", ["", None, 7, "a\0b", b""])
def test_what_is_no_path_raised_something_raw(bad):
    with open_stand_in() as context, pytest.raises(ParamError, match=r"path=.* must be the path of a file"):
        context.trace(bad)
    with pytest.raises(ParamError, match=r"path=.* must be the path of a file"):
        read_trace(bad)


def test_a_path_of_bytes(path):
    with open_stand_in() as context, context.trace(bytes(path)):
        context.decode(pykv.Batch([1]))
    assert len(read_trace(bytes(path)).steps) == 1


def test_a_pipe_as_trace_waited_for_ever(path):
    os.mkfifo(path)
    with open_stand_in() as context, pytest.raises(TraceError, match="not a regular file"):
        context.trace(path)
    with pytest.raises(TraceError, match="not a regular file"):
        read_trace(path)


def test_a_decode_under_way_was_lost_when_the_trace_closed(path):
    inside, go_on = threading.Event(), threading.Event()
    with open_stand_in() as context, context.trace(path) as trace:
        step = context._step

        def waiting(*args):
            inside.set()
            assert go_on.wait(30)
            step(*args)

        context._step = waiting
        thread = threading.Thread(target=context.decode, args=(pykv.Batch([1]),))
        thread.start()
        assert inside.wait(30)
        with pytest.raises(ConcurrentUseError):
            trace.close()
        assert not trace.closed
        go_on.set()
        thread.join()
        trace.close()
    assert len(read_trace(path).steps) == 1


def test_what_broke_off_is_told_by_what_was_stored_not_by_the_name_of_the_error(path):
    with open_stand_in(n_ubatch=4) as context, context.trace(path):
        step, n_left = context._step, [2]

        def failing(*args):
            if not n_left[0]:
                raise ArithmeticError("no error that pykv knows")
            n_left[0] -= 1
            step(*args)

        context._step = failing
        for _ in range(2):  # after two ubatches, and before the first
            with pytest.raises(ArithmeticError):
                context.decode(pykv.Batch(range(12)))
        del context._step
        with pytest.raises(NoSlotError):
            context.decode(pykv.Batch(range(251), logits="none"))
    first, second, refused = read_trace(path).steps
    assert (first.stored, second.stored, refused.stored) == (tuple(range(8)), (), None)
    assert second.computed() is None
    assert refused.computed() is refused


def test_cells_are_hashed_by_what_they_hold_not_by_where(path):
    found = []
    for n_ubatch, spare in ((4, 0), (16, 9)):
        with open_stand_in(n_seq_max=2, n_ubatch=n_ubatch) as context, context.trace(path):
            if spare:
                context.decode(pykv.Batch(range(spare), seq_id=1))
            context.decode(pykv.Batch(range(20)))
            context.memory.seq_rm(0, 3, 5)
        found.append([step["cells"]["0"] for step in lines(path)[1:] if "0" in step["cells"]])
    assert found[0] == found[1]
    assert [one[0] for one in found[0]] == [20, 18]


@given(st.lists(st.integers(0, 60), max_size=12), st.lists(st.integers(0, 60), max_size=12))
def test_hashes_are_alike_where_the_same_is_held(one, other):
    hashes = [_hashes(np.array(values, np.int32)) for values in (one, other)]
    assert (hashes[0] == hashes[1]) == (sorted(one) == sorted(other))


def test_half_a_batch_that_was_cancelled_is_told_from_the_whole(path):
    with open_stand_in(n_ubatch=4) as context, context.trace(path):
        step, n_done = context._step, []

        def cancel_after_two(*args):
            step(*args)
            n_done.append(1)
            if len(n_done) == 2:
                context._cancel.set()

        context._step = cancel_after_two
        with pytest.raises(ComputeCancelled):
            context.decode(pykv.Batch(range(12)))
        context._step = step
        context.decode(pykv.Batch([8]))
    first, second = read_trace(path).steps
    assert first.outcome.error == "ComputeCancelled"
    assert first.pos == list(range(12))
    assert first.ranges == {0: (0, 7)}
    computed = first.computed()
    assert computed.tokens == tuple(range(8))
    assert (computed.pos, computed.out, computed.outcome) == (list(range(8)), (), Outcome())
    assert second.computed() is second


def test_nothing_is_recorded_after_close(path):
    with open_stand_in() as context:
        with context.trace(path) as trace:
            context.decode(pykv.Batch([1]))
        assert (trace.n_steps, trace.closed) == (1, True)
        before = path.read_bytes()
        context.decode(pykv.Batch([2]))
        context.memory.clear()
        trace.close()
        assert path.read_bytes() == before
        assert context.traces == []


def test_closing_the_context_ends_its_traces(path):
    with open_stand_in() as context:
        trace = context.trace(path)
        context.decode(pykv.Batch([1]))
    assert trace.closed
    with pytest.raises(UseAfterCloseError):
        context.trace(path)


def test_several_traces_at_once(tmp_path):
    with open_stand_in() as context, context.trace(tmp_path / "a"):
        with context.trace(tmp_path / "b", tokens=False):
            context.decode(pykv.Batch([2]))
        context.decode(pykv.Batch([3]))
    assert [step["tokens"] for step in lines(tmp_path / "a")[1:]] == [[2], [3]]
    assert [step["pos"] for step in lines(tmp_path / "b")[1:]] == [[0]]


def test_every_step_is_on_disk_at_once(path):
    with open_stand_in() as context, context.trace(path):
        for n in range(1, 4):
            context.decode(pykv.Batch([n]))
            assert len(lines(path)) == 1 + n


def test_tracing_changes_no_bit(path):
    rows = []
    for is_traced in (False, True):
        with open_stand_in() as context:
            if is_traced:
                context.trace(path)
            context.decode(pykv.Batch(range(30), logits="all"))
            rows.append(context.logits)
    assert np.array_equal(*rows)


# writing fails


def test_a_folder_that_is_missing(tmp_path):
    with open_stand_in() as context, pytest.raises(TraceError, match="cannot be written: No such file"):
        context.trace(tmp_path / "absent" / "trace")


class FullDisk:
    """A file of a disk with room for some bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self._file, self._room = path.open("wb", buffering=0), room

    def write(self, data) -> int:
        if self._room == 0:
            raise OSError(28, "No space left on device")
        n = self._file.write(data[: self._room])
        self._room -= n
        return n

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


def on_full_disk(context: Context, path: Path, room: int):
    trace = context.trace(path)
    header = path.read_bytes()
    trace._file.close()
    trace._file = FullDisk(path, len(header) + room)
    trace._file.write(header)
    return trace


def test_a_full_disk_ends_the_trace_not_the_decode(path):
    with open_stand_in() as context:
        trace = on_full_disk(context, path, room=150)
        context.decode(pykv.Batch([1], logits="none"))
        with pytest.warns(RuntimeWarning, match="the trace ends here: No space left"):
            context.decode(pykv.Batch([2], logits="none"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            context.decode(pykv.Batch([3]))
            context.memory.seq_rm(0, 2)
        assert not caught
        assert (trace.closed, trace.n_steps) == (True, 1)
        assert context.memory.pos_max(0) == 1
        trace.close()
        assert context.traces == []
    read = read_trace(path)
    assert read.is_cut
    assert [step.tokens for step in read.steps] == [(1,)]


def test_a_full_disk_where_warnings_are_errors(path):
    with open_stand_in() as context:
        on_full_disk(context, path, room=10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            context.decode(pykv.Batch([1]))
        assert context.logits.shape == (1, 251)


def test_a_trace_that_ended_early_had_no_mark(path):
    with open_stand_in() as context, context.trace(path) as trace:
        context.decode(pykv.Batch([1, 2]))
        kept = context.memory.snapshot(0)
        with pytest.warns(RuntimeWarning, match="the trace ends here: restore"):
            context.memory.restore(0, kept)
        context.decode(pykv.Batch([3]))
        assert trace.closed
    assert lines(path)[-1] == {"ended": "restore: a snapshot was put back, whose rows a trace does not hold"}
    read = read_trace(path)
    assert (len(read.steps), read.ended) == (1, lines(path)[-1]["ended"])


def test_a_trace_ends_where_a_state_is_loaded(path):
    with open_stand_in() as context, context.trace(path) as trace:
        context.decode(pykv.Batch([1, 2]))
        blob = saved(context.memory, 0)
        with pytest.raises(StateError):
            context.memory.load_state(0, (), blob)
        with pytest.warns(RuntimeWarning, match="the trace ends here: load_state"):
            load(context.memory, blob, 0)
        assert trace.closed
    assert lines(path)[-1] == {"ended": "load_state: a state was loaded, whose rows a trace does not hold"}


# reading


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "whole"
    with open_stand_in(n_seq_max=2, type_k="q8_0", kv_unified=False, n_ctx=512) as context, context.trace(path):
        context.decode(pykv.Batch([5, 7], seq_id=[0, 1]))
        context.memory.seq_rm(0, 0, 1)
    return path.read_bytes()


def test_what_was_written_is_read(path, written):
    path.write_bytes(written)
    read = read_trace(path)
    header = read.header
    assert (header.version, header.has_tokens) == (pykv.__version__, True)
    params = header.params
    assert (params.n_ctx, params.n_seq_max, params.kv_unified) == (512, 2, False)
    assert (params.type_k, params.type_v, params.flash_attn) == ("q8_0", "f16", True)
    assert header.devices == ("CPU",)
    assert (header.model.architecture, header.model.n_vocab) == ("stand-in", 251)
    assert header.model.shape == replace(SHAPE, spec=json.loads(json.dumps(SHAPE.spec)))
    decode, verb = read.steps
    assert isinstance(decode, DecodeStep)
    assert (decode.tokens, decode.pos, decode.seqs_by_token, decode.out) == ((5, 7), [0, 0], ((0,), (1,)), (1,))
    assert decode.ranges == {0: (0, 0), 1: (0, 0)}
    assert len(decode.rows) == 1
    assert {seq: one.n for seq, one in decode.held.items()} == {0: 1, 1: 1}
    assert verb == VerbStep("seq_rm", (0, 0, 1), Outcome(True), {1: (0, 0)}, {}, line=3)
    assert (str(decode), str(verb)) == ("decode of 2 tokens of sequence 0, 1", "seq_rm(0, 0, 1)")
    assert not read.is_cut
    assert read.ended is None


@pytest.mark.parametrize("n_lost", [1, 2, 40])
def test_a_last_line_that_was_cut_off_is_left_out(path, written, n_lost):
    path.write_bytes(written[:-n_lost])
    read = read_trace(path)
    assert len(read.steps) == (2 if n_lost == 1 else 1)  # without its line end a line is still whole
    assert read.is_cut == (n_lost > 1)


HEADER, DECODE = b'"pykv_trace":1', b'"do":"decode"'
DAMAGE = {
    "empty": (None, b"", "not a trace of pykv"),
    "other": (None, b"GGUF\x03\x00\x00\x00", "not a trace of pykv"),
    "other JSON": (None, b'{"a": 1}\n', "not a trace of pykv"),
    "header alone, cut": (None, b'{"pykv_trace":1,', "line 1: the header is cut off"),
    "newer": (HEADER, b'"pykv_trace":2', "line 1: pykv_trace=2: this pykv reads version 1"),
    "no model": (b'"model":', b'"modem":', "line 1: 'model' is missing"),
    "bad parameter": (b'"n_ctx":512', b'"n_ctx":"x"', "line 1: n_ctx='x'"),
    "novel parameter": (b'"n_ctx":512', b'"n_cxt":512', "line 1: .*n_cxt"),
    "bad layer": (b'"n_embd_head_k":64', b'"n_embd_head_k":-4', "line 1: n_embd_head_k=-4"),
    "bad attention": (b'"many":"flash"', b'"many":"flesh"', "line 1: many='flesh' must be one of fused, "),
    "bad depth": (b'"transpose_from":null', b'"transpose_from":-3', "line 1: transpose_from=-3"),
    "bad prompt depth": (b'"fuse_from":null', b'"fuse_from":2.5', "line 1: fuse_from=2.5"),
    "no JSON": (DECODE, b'"do":decode', "line 2: damaged"),
    "no UTF-8": (DECODE, b'"do":"\xff"', "line 2: damaged"),
    "no object": (b"\n", b"\n[]\n", "line 2: damaged: a JSON object is needed"),
    "empty line": (b"\n", b"\n\n", "line 2: damaged"),
    "deep": (b"\n", b"\n" + b"[" * 100_000 + b"\n", "line 2: damaged"),
    "novel verb": (b'"do":"seq_rm"', b'"do":"seq_rn"', "line 3: do='seq_rn' is unknown; known: decode, clear"),
    "arguments": (b'"args":[0,0,1]', b'"args":[0,0]', "line 3: seq_rm takes 3 arguments, got 2"),
    "no outcome": (b'"outcome":true,', b"", "line 3: 'outcome' is missing"),
    "lengths": (b'"tokens":[5,7]', b'"tokens":[5]', "line 2: 1 tokens have the sequences of 2"),
    "positions": (b'"pos":[0,0]', b'"pos":[0,0,0]', r"line 2: pos=\[0, 0, 0\] must be a list of 2 whole"),
    "text": (b'"tokens":[5,7]', b'"tokens":["a","b"]', "line 2: tokens="),
    "huge": (b'"tokens":[5,7]', b'"tokens":[5,99999999999]', "line 2: tokens="),
    "outputs": (b'"out":[1]', b'"out":[2]', r"line 2: out=\[2\] must name some of 2 tokens"),
    "fingerprint": (b'"rows":[[', b'"rows":[[1,', "line 2: .* is no fingerprint"),
    "end without reason": (b"\n", b'\n{"ended":5}\n', "line 2: ended=5 must be a text"),
    "step after the end": (b"\n", b'\n{"ended":"by a test"}\n', "line 3: the trace ended before it: by a test"),
    "ends": (b'"seen":{"1":[0,0]}', b'"seen":{"1":[0]}', "line 3: "),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_names_line_and_fault(path, written, name):
    old, new, message = DAMAGE[name]
    assert old is None or old in written
    path.write_bytes(new if old is None else written.replace(old, new, 1))
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))


ABSENT = object()
OTHERS = (5, -1, "x", None, [], {}, [5], ["x"], [[]], {"a": 1}, {"0": "x"}, True, ABSENT)
RAW = re.compile(r"'\w+' object|NoneType|positional|indices|unpack|iterable|attribute|supported|literal|\w+Error\b")


def _places(record, path=()):
    for key in record if isinstance(record, dict) else range(len(record[:1])) if isinstance(record, list) else ():
        yield (*path, key)
        yield from _places(record[key], (*path, key))


def _edited(record, place, value):
    edited = json.loads(json.dumps(record))
    inside = edited
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    if value is ABSENT:
        del inside[place[-1]]
    return json.dumps(edited).encode()


@pytest.mark.parametrize("i", range(3))
def test_an_edited_field_gave_a_raw_error(path, written, i):
    """Every field becomes something else, or is lost: it is read, or a sentence names the line and the field."""
    before, line, after = (all_lines := written.splitlines())[:i], all_lines[i], all_lines[i + 1 :]
    record = json.loads(line)
    for place in _places(record):
        for value in OTHERS if place != ("pykv_trace",) else ():
            path.write_bytes(b"\n".join([*before, _edited(record, place, value), *after, b""]))
            try:
                read_trace(path)
            except TraceError as error:
                said = str(error).removeprefix(f"{path}, line {i + 1}: ")
                assert not RAW.search(said), (place, value)


def test_a_file_that_is_missing(path):
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path_factory, written, data):
    """Any byte may be another one, be missing, or be there twice."""
    at = data.draw(st.integers(0, len(written) - 1))
    new = data.draw(st.sampled_from([b"", b"0", b"-", b'"', b"[", b"null", b"1e999", written[at : at + 1] * 2]))
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(written[:at] + new + written[at + 1 :])
    with suppress(TraceError):
        assert len(read_trace(path).steps) <= 2


def test_a_layer_that_the_trace_describes_is_the_one_that_ran(path, written):
    path.write_bytes(written)
    layer = read_trace(path).header.model.shape.spec["layers"][0]
    assert layer["n_head_kv"] == LAYER.n_head_kv
    assert layer["rope"]["freq_base"] == 10000.0
