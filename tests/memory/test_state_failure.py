"""A state that cannot be loaded, or written to its end, changes nothing: neither cells nor a byte of the rows."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import state_memories
from support.state_io import load, parsed, rows_of, saved
from support.state_kinds import KINDS, SPECS, bookkeeping, data, decode, fill, make, scribble

from pykv.errors import (
    ConcurrentUseError,
    NoSlotError,
    ParamError,
    SequenceError,
    StateError,
    UseAfterCloseError,
)
from pykv.memory.state_kv import KVState
from pykv.memory.state_recurrent import RecurrentState
from pykv.state_format import KVSection, Span

EACH = pytest.mark.parametrize("seq_id", [-1, 0, 1])


_unpadded, kind, memory = state_memories.unpadded, state_memories.kind, state_memories.memory


def held(memory: Any) -> tuple[list[Any], list[bytes]]:
    return bookkeeping(memory), data(memory)


class SinkFull(Exception):
    pass


def test_a_sink_that_fails_at_any_piece_changes_nothing(memory: Any) -> None:
    before, n_pieces = held(memory), []
    memory.state_image(-1).write_to(n_pieces.append)
    for n in range(0, len(n_pieces), 7):
        left = iter(range(n))

        def sink(_: memoryview, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise SinkFull

        with pytest.raises(SinkFull):
            memory.state_image(-1).write_to(sink)
        assert held(memory) == before
    decode(memory, 0, 1)  # the guard has been left


def test_what_the_sink_gets_cannot_be_written(memory: Any) -> None:
    memory.state_image(-1).write_to(lambda piece: setattr(piece, "x", 1) if not piece.nbytes else None)
    pieces: list[memoryview] = []
    memory.state_image(-1).write_to(pieces.append)
    assert all(piece.format == "B" and piece.contiguous for piece in pieces)


def test_an_image_is_of_one_moment(memory: Any) -> None:
    image = memory.state_image(0)
    memory.seq_rm(1)
    with pytest.raises(ConcurrentUseError, match="changed since"):
        image.write_to(lambda _: None)
    image = memory.state_image(0)
    with pytest.raises(ConcurrentUseError, match="in use"):
        image.write_to(lambda _: memory.seq_rm(0))
    memory.close()
    with pytest.raises(UseAfterCloseError):
        image.write_to(lambda _: None)


@EACH
def test_a_source_that_ends_early(memory: Any, seq_id: int) -> None:
    whole = saved(memory, seq_id)
    sections, before = parsed(memory, whole, whole=seq_id == -1), held(memory)
    last = max((rows.span.start + rows.span.nbytes for one in sections for rows in rows_of(one)), default=0)
    for n in (0, 100, last - 1):
        with pytest.raises(StateError, match="source"):
            memory.load_state(seq_id, sections, whole[:n])
        assert held(memory) == before
    memory.load_state(seq_id, sections, whole[:last])


@EACH
def test_no_room_in_the_last_part(kind: tuple[str, bool], seq_id: int) -> None:
    """A sequence that other sequences leave no cells for; a whole that is larger than the memory."""
    name, unified = kind
    if name.startswith("rec") or name == "window everywhere":
        return  # a state always finds a cell, and so does a window
    with make(name, unified, n_cells=64) as source, make(name, unified, n_cells=16) as memory:
        for _ in range(5):
            decode(source, 0, 8)
        scribble(source)
        decode(memory, 2, 4)
        decode(memory, 1, 4)
        scribble(memory, 3)
        blob, before = saved(source, seq_id if seq_id == -1 else 0), held(memory)
        with pytest.raises((NoSlotError, StateError)):
            load(memory, blob, seq_id)
        assert held(memory) == before


def test_no_room_in_shared_cells() -> None:
    with make("kv", n_cells=40) as memory:
        decode(memory, 0, 20)
        scribble(memory)
        blob = saved(memory, 0)
        decode(memory, 1, 15)
        before = held(memory)
        with pytest.raises(NoSlotError, match="20 cells of a state, and stream 0 has 5 of 40 free"):
            load(memory, blob, 2)
        assert held(memory) == before


@EACH
@pytest.mark.parametrize("after", [False, True])
def test_a_part_that_fails(memory: Any, seq_id: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or behind what it does to its cells; the parts before it are done by then."""
    blob, before = saved(memory, seq_id), held(memory)
    decode_more(memory)
    scribble(memory, 5)
    before = held(memory)
    last = memory.state_parts(False)[-1]
    kind_of = type(last)
    place = kind_of.place

    def fails(self: Any, section: Any, loading: Any) -> Any:
        if self.layout != last.layout:
            return place(self, section, loading)
        if after:
            place(self, section, loading)
        raise MemoryError

    monkeypatch.setattr(kind_of, "place", fails)
    with pytest.raises(MemoryError):
        load(memory, blob, seq_id)
    assert held(memory) == before
    memory.check()


def decode_more(memory: Any) -> None:
    for s in range(3):
        decode(memory, s, 2)
    memory.seq_rm(2)


@EACH
def test_rows_that_cannot_be_written_leave_an_empty_sequence(
    memory: Any, seq_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then some are overwritten: what a sequence holds would be neither old nor new. Others are as they were."""
    blob = saved(memory, seq_id)
    others = {s: saved(memory, s) for s in range(3) if seq_id not in (-1, s)}
    for part in (KVState, RecurrentState):
        place = part.place

        def broken(self: Any, section: Any, loading: Any, place: Any = place) -> Any:
            return [*place(self, section, loading), lambda: 1 // 0]

        monkeypatch.setattr(part, "place", broken)
    with pytest.raises(ZeroDivisionError):
        load(memory, blob, seq_id)
    monkeypatch.undo()
    memory.check()
    assert [memory.pos_max(s) for s in range(3) if s not in others] == [-1] * (3 - len(others))
    assert {s: saved(memory, s) for s in others} == others


@pytest.mark.parametrize("name", [*SPECS, "twin"])
def test_a_state_of_another_kind_of_memory(name: str) -> None:
    with make(name) as memory:
        fill(memory)
        before = held(memory)
        for other_name, unified in KINDS:
            if {name, other_name} in SAME or (unified and name == other_name):
                continue
            with make(other_name, unified) as other:
                fill(other)
                if other.state_layouts() == memory.state_layouts():
                    continue  # states alone, which have no streams
                for seq_id in (-1, 0) if name != other_name else (-1,):  # streams beside a sequence are no matter
                    blob = saved(other, seq_id)
                    sections = parsed(other, blob, whole=seq_id == -1)
                    with pytest.raises(StateError):
                        memory.load_state(seq_id, sections, blob)
                    assert held(memory) == before, other_name


SAME = [{"kv", "window everywhere"}]
"""Kinds that store the same."""


def test_parts_that_do_not_belong_together() -> None:
    with make("hybrid") as long, make("hybrid") as short:
        decode(long, 0, 9)
        decode(short, 0, 4)
        before = held(short)
        a, b = saved(long, 0), saved(short, 0)
        state_of_long = a[parsed(long, a, whole=False)[0].span.nbytes :]
        keys_of_short = b[: parsed(short, b, whole=False)[0].span.nbytes]
        with pytest.raises(StateError, match="do not belong together: sequence 0: its state ends at 8"):
            load(short, keys_of_short + state_of_long, 0)
        assert held(short) == before


def test_two_caches_over_one_set_of_cells_must_agree_on_it() -> None:
    with make("twin") as memory:
        fill(memory)
        one, two = saved(memory, 0), saved(memory, 1)
        n_one, n_two = (parsed(memory, blob, whole=False)[0].span.nbytes for blob in (one, two))
        before = held(memory)
        with pytest.raises(StateError, match="the cells differ"):
            load(memory, one[:n_one] + two[n_two:], 0)
        assert held(memory) == before


def test_too_few_parts(memory: Any) -> None:
    blob = saved(memory, 0)
    sections, before = parsed(memory, blob, whole=False), held(memory)
    for wrong in ((), sections * 2):
        with pytest.raises(StateError, match="parts"):
            memory.load_state(0, wrong, blob)
    assert held(memory) == before


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception]]] = [
    ((3,), {}, SequenceError), ((-2,), {}, SequenceError), (("0",), {}, SequenceError), ((1.0,), {}, SequenceError),
    ((0,), {"partial": 1}, ParamError), ((0,), {"convert": "yes"}, ParamError),
]  # fmt: skip


def test_wrong_arguments_change_nothing(memory: Any) -> None:
    blob, before = saved(memory, 0), held(memory)
    sections = parsed(memory, blob, whole=False)
    for args, keywords, error in WRONG:
        with pytest.raises(error):
            memory.load_state(*args, sections, blob, **keywords)
        if "convert" not in keywords:
            with pytest.raises(error):
                memory.state_image(*args, **keywords)
    for source in (7, "text", None):
        with pytest.raises(ParamError, match="source"):
            memory.load_state(0, sections, source)
    with pytest.raises(ParamError, match="dialect"):
        memory.state_image(0, dialect="10/3")
    with pytest.raises(ParamError, match="partial"):
        memory.state_layouts(partial="no")
    assert held(memory) == before


def test_a_closed_memory_has_no_states(memory: Any) -> None:
    blob = saved(memory, 0)
    sections = parsed(memory, blob, whole=False)
    memory.close()
    for use in (
        memory.state_layouts,
        lambda: memory.state_image(0),
        lambda: memory.load_state(0, sections, blob),
    ):
        with pytest.raises(UseAfterCloseError):
            use()


def test_a_part_is_not_loaded_on_its_own() -> None:
    with make("iswa") as memory:
        fill(memory)
        blob = saved(memory.base, 0)
        with pytest.raises(ParamError, match="part of a memory"):
            load(memory.base, blob, 0)


def test_loading_is_told_once(memory: Any) -> None:
    heard: list[tuple[Any, ...]] = []
    memory.listeners.append(lambda *call: heard.append(call))
    blob = saved(memory, 0)
    result = load(memory, blob, 0)
    with pytest.raises(StateError) as refused:
        memory.load_state(0, (), blob)
    assert [(name, args[0], outcome) for name, args, outcome in heard] == [
        ("load_state", 0, result),
        ("load_state", 0, refused.value),
    ]


def test_an_earlier_snapshot_does_not_know_what_was_loaded() -> None:
    with make("kv") as memory:
        fill(memory)
        with memory.snapshot(0) as kept:
            load(memory, saved(memory, 0), 0)
            with pytest.raises(ParamError):
                memory.restore(0, kept)


def test_a_mapped_file_is_a_source(tmp_path: Path) -> None:
    with make("hybrid") as memory:
        fill(memory)
        blob = saved(memory, 0)
        path = tmp_path / "state"
        path.write_bytes(blob)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            sections = parsed(memory, blob, whole=False)
            memory.seq_rm(0)
            memory.load_state(0, sections, mapped)
            del sections
        assert saved(memory, 0) == blob


def test_spans_that_lie_outside_or_are_of_another_length() -> None:
    with make("kv") as memory:
        fill(memory)
        blob, before = saved(memory, 0), held(memory)
        (section,) = parsed(memory, blob, whole=False)
        assert isinstance(section, KVSection)
        (stream,) = section.streams
        for span in (Span(-4, stream.k[0].span.nbytes), Span(len(blob), stream.k[0].span.nbytes), Span(0, 8)):
            wrong = replace(section, streams=(replace(stream, k=(replace(stream.k[0], span=span), stream.k[1])),))
            with pytest.raises(StateError):
                memory.load_state(0, (wrong,), blob)
            assert held(memory) == before
