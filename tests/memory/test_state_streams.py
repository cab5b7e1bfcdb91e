"""States of shared cells into streams and back, held against plain tables of what each sequence stores."""

from __future__ import annotations

import tracemalloc
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.histories import STEPS, live
from support.naive_state import stored_rows
from support.state_io import load, parsed, saved
from support.state_kinds import KINDS, bookkeeping, data, decode, fill, is_kv, leaves, make, scribble

from pykv.cells import SwaType
from pykv.errors import NoSlotError, StateError
from pykv.ggml import tensor_rows
from pykv.memory import KVCache, LayerSpec, MemorySpec, iswa, state_runs
from pykv.memory.state_kv import KVState

NAMES = sorted({name for name, _ in KINDS})
SPEC = MemorySpec((LayerSpec(2, 64, 64), LayerSpec(2, 64, 64)))
FAR = SimpleNamespace(ggml_backend_buffer_is_host=lambda _: False)
"""What finds no memory that the CPU can reach."""

Table = dict[tuple[int, int], tuple[bytes, ...]]
"""(sequence, position) → the rows of all tensors."""


@pytest.fixture(autouse=True)
def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iswa, "PAD", 1)


def held(memory: Any) -> list[Table]:
    """Return what each part stores of each sequence, read cell by cell from the raw tensors."""
    return [_held_kv(one) if is_kv(one) else _held_states(one) for one in leaves(memory)]


def _held_kv(cache: Any) -> Table:
    found: Table = {}
    for stream, cells in enumerate(cache.streams.cells):
        used = [i for i in range(cells.n) if cells.pos[i] >= 0]
        rows = list(zip(*stored_rows(cache, stream, used), strict=True))
        for i, row in zip(used, rows, strict=True):
            found |= {(s, int(cells.pos[i])): row for s in cells.owners(i)}
    return found


def _held_states(memory: Any) -> Table:
    found: Table = {}
    for s in range(memory.n_seq_max):
        row = memory.states.row(s)
        if row is not None:
            both = [one for layer in memory.plan.layers for one in memory.tensors(layer.il) if one is not None]
            raw = [one.raw_bytes().reshape(-1, one.ne[0] * 4)[row].tobytes() for one in both]
            found[s, memory.pos_max(s)] = tuple(raw)
    return found


def expected(source: Any, target: Any) -> list[Table]:
    """Return what a memory should hold of another one's; raises `NoSlotError` where it lacks the room."""
    return [_expected_of(table, leaf) for table, leaf in zip(held(source), leaves(target), strict=True)]


def _expected_of(table: Table, leaf: Any) -> Table:
    if not is_kv(leaf):
        return table
    if not _fits(table, leaf):
        table = _seen(table, leaf)
    if not _fits(table, leaf):
        raise NoSlotError
    return table


def _seen(table: Table, leaf: Any) -> Table:
    """Return what the window of a part, if it has one, shows the last token of each sequence."""
    if not is_kv(leaf) or leaf.spec.window.type is SwaType.NONE:
        return table
    ends = {s: max(p for q, p in table if q == s) for s, _ in table}
    return {at: row for at, row in table.items() if ends[at[0]] - at[1] < leaf.spec.window.n_swa}


def _fits(table: Table, leaf: Any) -> bool:
    """Tell whether streams hold all rows, each in a cell of its own."""
    counts = [sum(leaf.streams.stream_of(s) == stream for s, _ in table) for stream in range(leaf.n_stream)]
    return max(counts) <= leaf.n_cells


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unified", [True, False])
@settings(max_examples=12, deadline=None)
@given(steps=STEPS, other=STEPS, n_cells=st.sampled_from([16, 30, 200]), more=st.booleans())
def test_any_history_in_the_other_kind_of_streams(
    name: str, unified: bool, steps: list, other: list, n_cells: int, more: bool
) -> None:
    """The same rows at the same positions; or too little room, and nothing has changed."""
    before_pad, iswa.PAD = iswa.PAD, 1
    try:
        n_seq = 5 if more else 3
        with make(name, unified) as one, make(name, not unified, n_cells, n_seq) as two:
            live(one, steps)
            live(two, other)
            scribble(one, 1)
            scribble(two, 2)
            for memory in (one, two):
                memory.update()
            blob, before = saved(one), (bookkeeping(two), data(two))
            try:
                wanted = expected(one, two)
            except NoSlotError:
                with pytest.raises(NoSlotError, match="cells of a state, and a stream has"):
                    load(two, blob, convert=True)
                assert (bookkeeping(two), data(two)) == before
                return
            done = load(two, blob, convert=True)
            two.check()
            assert held(two) == wanted
            assert done.is_lossless == (wanted == held(one))
            with make(name, unified, 5 * 200) as back:
                load(back, saved(two), convert=True)
                back.check()
                assert held(back) == wanted
    finally:
        iswa.PAD = before_pad


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("rec")])
def test_shared_cells_are_one_for_each_sequence(name: str) -> None:
    """And are not shared again on the way back: what is equal is no reason to be one."""
    with make(name) as source, make(name, False) as streams, make(name, n_cells=192) as back:
        decode(source, 0, 6)
        source.seq_cp(0, 1)
        source.update()
        scribble(source)
        with pytest.raises(StateError, match="streams: expected 3, found 1"):
            load(streams, saved(source))
        done = load(streams, saved(source), convert=True)
        assert done.is_lossless
        assert done.what == ("1 streams → 3",)
        done = load(back, saved(streams), convert=True)
        assert done.what == ("3 streams → 1",)
        for memory, n in ((source, 1), (streams, 2), (back, 2)):
            memory.check()
            kv = [one for one in leaves(memory) if is_kv(one)]
            assert {sum(cells.n_used for cells in one.streams.cells) for one in kv} == {6 * n}
        for memory in (streams, back):
            assert held(memory) == held(source)
            decode(memory, 0, 1)
            decode(memory, 1, 1)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    ("dtype", "v_trans"),
    [*product(("f32", "f16", "bf16", "q8_0", "q4_0", "q5_1", "iq4_nl"), [False]), *product(("f32", "f16"), [True])],
)
def test_every_type_and_layout(
    dtype: str, v_trans: bool, unified: bool, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are, in small pieces, also where the CPU does not reach."""
    how = {"n_cells": 64, "n_seq_max": 3, "n_threads": 1, "type_k": dtype, "type_v": dtype, "v_trans": v_trans}
    with KVCache(SPEC, unified=unified, **how) as source, KVCache(SPEC, unified=not unified, **how) as target:
        fill(source)
        scribble(target, 3)
        monkeypatch.setattr(state_runs, "STAGING_BYTES", 700)
        if far:
            monkeypatch.setattr(tensor_rows, "lib", FAR)
        assert load(target, saved(source), convert=True).is_lossless
        assert held(target) == held(source)


@pytest.mark.parametrize("unified", [True, False])
def test_another_type_and_order_of_v_at_once(unified: bool) -> None:
    how: dict[str, Any] = {"n_cells": 64, "n_seq_max": 3, "n_threads": 1}
    mine = KVCache(SPEC, unified=unified, type_v="f32", v_trans=True, **how)
    theirs = KVCache(SPEC, unified=not unified, type_k="q8_0", type_v="q8_0", **how)
    with mine as source, theirs as target:
        fill(source)
        rng = np.random.default_rng(0)
        for _, *pair in source.store.own_tensors():
            for one in pair:
                values = rng.standard_normal(one.nbytes // one.dtype.type_size).astype(np.float32)
                one.set(values.astype(np.float16) if one.dtype.type_size == 2 else values)
        done = load(target, saved(source), convert=True)
        assert done.what[1:] == ("V by channel → by cell", "K f16 → q8_0", "V f32 → q8_0")
        for s, il in product(range(3), range(2)):
            for ours, of in ((target.k(il, s), source.k(il, s)), (target.v(il, s), source.v(il, s))):
                assert np.abs(ours - of).max() <= 0.02 * np.abs(of).max()


# one sequence


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_one_sequence_was_refused_for_the_number_of_streams_beside_its_own(name: str, unified: bool) -> None:
    """Its cells are in one stream on either side, and its bytes are the same: nothing is converted."""
    with make(name, False, n_seq=2) as source, make(name, unified, 128, n_seq=4) as target:
        for _ in range(3):
            decode(source, 0, 5)
            decode(source, 1, 4)
        for s in range(3):
            decode(target, s, 5)
        scribble(source, 1)
        scribble(target, 2)
        others = [saved(target, s) for s in range(3)]
        assert not load(target, saved(source, 1), 3)
        target.check()
        assert [{at[1]: row for at, row in table.items() if at[0] == 3} for table in held(target)] == [
            {p: row for (s, p), row in _seen(table, leaf).items() if s == 1}
            for table, leaf in zip(held(source), leaves(source), strict=True)
        ]
        assert [saved(target, s) for s in range(3)] == others
        decode(target, 3, 1)


# how many sequences


@pytest.mark.parametrize(("name", "unified"), KINDS, ids=str)
def test_a_memory_for_fewer_sequences_takes_those_that_it_has(name: str, unified: bool) -> None:
    """None is dropped: one beyond is refused by its number."""
    with make(name, unified) as source, make(name, unified, 96, n_seq=2) as target:
        fill(source)
        decode(target, 1, 3)
        scribble(target, 2)
        blob, before = saved(source), (bookkeeping(target), data(target))
        sections = parsed(source, blob, whole=True)
        with pytest.raises(StateError, match="expected less than n_seq_max 2, found 2, at byte"):
            load(target, blob, convert=True)
        with pytest.raises(StateError, match="expected less than n_seq_max 2, found 2, at byte"):
            target.load_state(-1, sections, blob, convert=True)
        assert (bookkeeping(target), data(target)) == before
        source.seq_rm(2)
        load(target, saved(source), convert=True)
        target.check()
        assert held(target) == expected(source, target)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_seq", [2, 5])
def test_streams_of_another_number(name: str, n_seq: int) -> None:
    with make(name, False) as source, make(name, False, n_seq=n_seq) as target:
        fill(source)
        source.seq_rm(2)
        decode(target, 1, 3)
        done = load(target, saved(source), convert=True)
        target.check()
        assert done.is_lossless
        assert held(target) == held(source)


# room


def test_a_stream_without_room_is_named_with_the_numbers() -> None:
    with make("kv", n_cells=64) as source, make("kv", False, n_cells=24) as target:
        decode(source, 0, 20)
        decode(source, 1, 25)
        decode(target, 2, 7)
        scribble(target)
        before = bookkeeping(target), data(target)
        with pytest.raises(NoSlotError, match="stream 1: 25 cells of a state, and a stream has 24 cells"):
            load(target, saved(source), convert=True)
        assert (bookkeeping(target), data(target)) == before
        source.seq_rm(1)
        source.seq_cp(0, 1)
        load(target, saved(source), convert=True)
        assert held(target) == held(source)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", ["iswa", "hybrid iswa", "window everywhere"])
def test_a_window_without_room_takes_what_is_seen(name: str, unified: bool) -> None:
    n_cells = {"window everywhere": 13}.get(name, 64)
    with make(name, unified) as source, make(name, not unified, n_cells) as target:
        for _ in range(3 if unified else 2):
            for s in range(1 if unified else 3):
                decode(source, s, 8)
        scribble(source)
        done = load(target, saved(source), convert=True)
        target.check()
        assert done.n_left_out
        assert not done.is_lossless
        assert done.what[-1] == f"{done.n_left_out} cells that a window hides left out"
        assert held(target) == expected(source, target) != held(source)
        for s in range(1 if unified else 3):
            assert saved(target, s)[20:]
            decode(target, s, 1)


def test_cells_of_nobody_have_no_stream() -> None:
    with make("kv", n_seq=3) as source, make("kv", False) as target, make("kv", n_seq=3) as same:
        decode(source, 0, 3)
        scribble(source)
        blob = bytearray(saved(source))
        at = 4 + 4 + 12 + 4  # the number of ids of the second cell
        assert blob[at : at + 8] == b"\1\0\0\0\0\0\0\0"
        blob[at : at + 8] = bytes(4)
        done = load(target, bytes(blob), convert=True)
        assert done.what == ("1 streams → 3", "1 cells of no sequence left out")
        assert not done.is_lossless
        assert sorted(held(target)[0]) == [(0, 0), (0, 2)]
        assert not load(same, bytes(blob), convert=True)


# failure


@pytest.mark.parametrize(("name", "unified"), [one for one in KINDS if not one[0].startswith("rec")], ids=str)
def test_rows_that_cannot_be_written_leave_an_empty_memory(
    name: str, unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = KVState.place
    with make(name, unified) as source, make(name, not unified) as target:
        fill(source)
        source.seq_rm(2)
        decode(target, 0, 3)
        monkeypatch.setattr(KVState, "place", lambda *given: [*place(*given), lambda: 1 // 0])
        with pytest.raises(ZeroDivisionError):
            load(target, saved(source), convert=True)
        target.check()
        assert [target.pos_max(s) for s in range(3)] == [-1] * 3


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("types", [{}, {"type_k": "q8_0", "type_v": "q8_0"}])
def test_little_memory_is_needed(unified: bool, types: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 MiB of rows, pieces pass through."""
    spec = MemorySpec((LayerSpec(8, 128, 128),))
    monkeypatch.setattr(state_runs, "STAGING_BYTES", 2**18)
    how: dict[str, Any] = {"n_cells": 2048, "n_seq_max": 2, "n_threads": 1}
    mine = KVCache(spec, unified=unified, v_trans=True, **how)
    theirs = KVCache(spec, unified=not unified, v_trans=not types, **how | types)
    with mine as source, theirs as target:
        for _ in range(128):
            decode(source, 0, 8)
            decode(source, 1, 8)
        blob = saved(source)
        sections = parsed(target, blob, whole=True, strict=False)
        tracemalloc.start()
        try:
            target.load_state(-1, sections, blob, convert=True)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(blob) > 2**23
        assert peak < 2**21
