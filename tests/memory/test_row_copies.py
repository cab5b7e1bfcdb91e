"""Rows follow copied cells, byte for byte: across streams, whole or in part, and when a shared cell moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cell_state import state
from support.kv_scene import run, store_positions
from support.moved_keys import MovedKeys
from support.naive_sequences import NaiveSequences
from support.row_writer import rotated

from pykv.errors import NoSlotError, ShiftUnsupported
from pykv.ggml import RopeParams
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySpec, UpdateStatus

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
SPEC = MemorySpec((LayerSpec(2, 64, 32), LayerSpec(1, 32, 64)))
"""Without rotary positions: what is moved keeps its bytes. Rows of different width, so that transposed V is padded."""

LAYOUTS = [(dtype, False) for dtype in TYPES] + [(dtype, True) for dtype in ("f32", "f16", "bf16")]


def make(n_cells: int = 16, spec: MemorySpec = SPEC, **settings) -> KVCache:
    return KVCache(spec, KVSettings(n_cells, **settings), n_threads=1)


def scribble(cache: KVCache) -> None:
    """Fill all K and V of a cache's own with random bytes."""
    rng = np.random.default_rng(len(cache.owners))
    for _, k, v in cache.store.own_tensors():
        for tensor in (k, v):
            tensor.set(rng.integers(0, 256, tensor.nbytes, np.uint8))


def rows_of(cache: KVCache, update: bool = True) -> list[bytes]:
    """Return the bytes of each row of all streams: K and V of every layer one after the other."""
    if update:
        cache.update()
    n, columns = cache.n_cells * cache.n_stream, []
    for _, k, v in cache.store.own_tensors():
        columns.append(k.raw_bytes().reshape(n, -1))
        if cache.store.v_trans:
            words = v.raw_bytes().reshape(cache.n_stream, v.ne[0], cache.n_cells, -1)
            columns.append(words.swapaxes(1, 2).reshape(n, -1))
        else:
            columns.append(v.raw_bytes().reshape(n, -1))
    return [row.tobytes() for row in np.concatenate(columns, axis=1)]


def held(cache: KVCache, seq_id: int, rows: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Return position and bytes of each token of a sequence, sorted."""
    stream = cache.streams.stream_of(seq_id)
    cells = cache.streams.cells[stream]
    return sorted((int(cells.pos[i]), rows[stream * cache.n_cells + i]) for i in np.flatnonzero(cells.member(seq_id)))


@pytest.mark.parametrize(("dtype", "v_trans"), LAYOUTS)
def test_whole_and_partial_copies_across_streams(dtype: str, v_trans: bool) -> None:
    with make(n_seq_max=3, unified=False, type_k=dtype, type_v=dtype, v_trans=v_trans) as cache:
        store_positions(cache, run(0, range(12)))
        store_positions(cache, run(1, range(8)))
        scribble(cache)
        before = rows_of(cache)
        token = {(s, p): before[s * 16 + p] for s, n in ((0, 12), (1, 8)) for p in range(n)}
        cache.seq_cp(0, 2)
        cache.seq_cp(1, 0, 3, 7)  # what was 3 to 6 of sequence 0 is replaced
        cache.seq_cp(0, 1, 5, 10)  # by what has been copied to it
        assert rows_of(cache, update=False) == before
        assert cache.update() is UpdateStatus.SUCCESS
        rows = rows_of(cache)
        assert held(cache, 2, rows) == [(p, token[0, p]) for p in range(12)]
        mixed = [(p, token[int(3 <= p < 7), p]) for p in range(12)]
        assert held(cache, 0, rows) == mixed
        assert held(cache, 1, rows) == [(p, token[1, p]) for p in range(5)] + mixed[5:10]
        cache.check()


@pytest.mark.parametrize(("dtype", "v_trans"), LAYOUTS)
@pytest.mark.parametrize("verb", ["seq_add", "seq_div"])
def test_a_shared_cell_that_moves_is_copied_first(verb: str, dtype: str, v_trans: bool) -> None:
    with make(32, n_seq_max=3, type_k=dtype, type_v=dtype, v_trans=v_trans) as cache:
        store_positions(cache, run((0, 1, 2), range(8)))
        scribble(cache)
        before = rows_of(cache)
        getattr(cache, verb)(1, 2, -1, 3)
        rows = rows_of(cache)
        assert rows[:8] == before[:8]
        for s in (0, 2):
            assert held(cache, s, rows) == sorted((p, before[p]) for p in range(8))
        moved = {p: p + 3 if verb == "seq_add" else p // 3 for p in range(2, 8)}
        assert held(cache, 1, rows) == sorted((moved.get(p, p), before[p]) for p in range(8))
        cache.check()


VERBS = st.one_of(
    st.tuples(st.just("seq_cp"), st.integers(0, 2), st.integers(0, 2), st.integers(-1, 12), st.integers(-1, 12)),
    st.tuples(st.just("seq_add"), st.integers(0, 2), st.integers(-1, 9), st.integers(-1, 12), st.integers(-4, 4)),
    st.tuples(st.just("seq_div"), st.integers(0, 2), st.integers(-1, 9), st.integers(-1, 12), st.integers(1, 3)),
    st.tuples(st.just("seq_rm"), st.integers(-1, 2), st.integers(-1, 9), st.integers(-1, 12)),
    st.tuples(st.just("seq_keep"), st.integers(0, 2)),
    st.tuples(st.just("update")),
)


@settings(max_examples=120, deadline=None)
@given(
    unified=st.booleans(), layout=st.sampled_from([("f32", False), ("q4_0", False), ("f16", True)]),
    verbs=st.lists(VERBS, max_size=25), n=st.lists(st.integers(1, 7), min_size=3, max_size=3),
)  # fmt: skip
def test_chains_of_copies_before_one_update(
    unified: bool, layout: tuple[str, bool], verbs: list[tuple], n: list[int]
) -> None:
    """Copies of copies, onto rows that were copied from: each sequence ends with the bytes of its tokens."""
    dtype, v_trans = layout
    n_cells = 24 if unified else 10
    naive = NaiveSequences(3, n_cells, unified)
    with make(n_cells, n_seq_max=3, unified=unified, type_k=dtype, type_v=dtype, v_trans=v_trans) as cache:
        scribble(cache)
        rows, tokens = rows_of(cache), []
        for s in range(3):
            store_positions(cache, run(s, range(n[s])))
            for p in range(n[s]):
                cells = cache.streams.cells[cache.streams.stream_of(s)]
                (cell,) = np.flatnonzero(cells.member(s) & (cells.pos == p))
                naive.store(s, p, len(tokens))
                tokens.append(rows[cache.streams.stream_of(s) * n_cells + cell])
        for name, *args in verbs:
            if name == "update":
                cache.update()
            else:
                _both(cache, naive, name, args)
            cache.check()
        rows = rows_of(cache)
        for s in range(3):
            assert held(cache, s, rows) == sorted((p, tokens[t]) for p, t in naive.rows(s))


def _both(cache: KVCache, naive: NaiveSequences, name: str, args: list[int]) -> None:
    before = state(cache.streams)
    try:
        getattr(cache, name)(*args)
    except (NoSlotError, ShiftUnsupported):
        assert getattr(naive, name)(*args) is False
        assert state(cache.streams) == before
    else:
        assert getattr(naive, name)(*args) is not False


def test_copied_rows_bring_the_moves_that_their_keys_have_yet_to_follow() -> None:
    spec = MemorySpec((LayerSpec(1, 64, 32, RopeParams(64)), LayerSpec(1, 64, 32, RopeParams(32, "neox"))))
    with make(32, spec, type_k="f32", n_seq_max=3, unified=False) as cache:
        keys = MovedKeys(cache, 10)
        keys.add(4, -1, 9)
        cache.seq_cp(0, 1)
        cache.seq_add(1, 0, -1, 2)
        cache.seq_cp(1, 2, 5, -1)
        keys.check("f32")
        for il, layer in enumerate(spec.layers):
            raw, pos = keys.raw[il][0], keys.pos + 2
            np.testing.assert_allclose(cache.k(il, 1), rotated(layer, raw, pos), atol=1e-5)
            np.testing.assert_allclose(cache.k(il, 2), rotated(layer, raw[pos >= 5], pos[pos >= 5]), atol=1e-5)


@pytest.mark.parametrize("unified", [True, False])
def test_rows_of_a_sharing_cache_follow_too(unified: bool) -> None:
    """Its own layers have other widths, types and layouts than those of the cache whose cells it sees."""
    how = {"n_seq_max": 2, "unified": unified}
    other = KVSettings(16, type_k="q8_0", type_v="f32", v_trans=True, **how)
    spec = MemorySpec((LayerSpec(1, 32, 32), LayerSpec(4, 32, 64)))
    with make(**how) as base, KVCache(spec, other, other=base, n_threads=1) as cache:
        store_positions(base, run(0, range(6)))
        for one in (base, cache):
            scribble(one)
        before = [rows_of(one) for one in (base, cache)]
        base.seq_cp(0, 1)
        base.seq_add(1, 2, -1, 5)
        cache.update()
        assert not base.streams.pending_copies
        for one, old in zip((base, cache), before, strict=True):
            rows = rows_of(one)
            assert held(one, 0, rows) == [(p, old[p]) for p in range(6)]
            assert held(one, 1, rows) == [(p if p < 2 else p + 5, old[p]) for p in range(6)]


def test_a_sharing_cache_that_is_gone_holds_nothing_up() -> None:
    how = {"n_seq_max": 2, "unified": False}
    with make(**how) as base:
        closed = KVCache(SPEC, KVSettings(16, **how), other=base, n_threads=1)
        dropped = KVCache(SPEC, KVSettings(16, **how), other=base, n_threads=1)
        store_positions(base, run(0, range(6)))
        closed.close()
        del dropped
        base.seq_cp(0, 1)
        assert base.update() is UpdateStatus.SUCCESS


def test_rows_that_nobody_holds_any_more_are_not_copied() -> None:
    with make(n_seq_max=2, unified=False) as cache:
        store_positions(cache, run(0, range(6)))
        scribble(cache)
        before = rows_of(cache)
        cache.seq_cp(0, 1)
        cache.seq_rm(1, 2, -1)
        rows = rows_of(cache)
        assert rows[16:18] == before[0:2]
        assert rows[18:] == before[18:]


@pytest.mark.parametrize("unified", [True, False])
def test_what_lay_between_in_a_chain_of_copies_is_gone_at_its_end(unified: bool) -> None:
    """Sequence 2 is a copy of sequence 1, which was a copy itself and is removed before any row has followed."""
    with make(n_seq_max=3, unified=unified) as cache:
        store_positions(cache, run(0, range(5)))
        scribble(cache)
        before = rows_of(cache)
        for src, dst in ((0, 1), (1, 2)):
            cache.seq_cp(src, dst)
            cache.seq_add(dst, 0, -1, 10)
        cache.seq_rm(1)
        rows = rows_of(cache)
        assert held(cache, 0, rows) == [(p, before[p]) for p in range(5)]
        assert held(cache, 2, rows) == [(p + 20, before[p]) for p in range(5)]


def test_rows_are_copied_before_what_they_were_copied_from_is_written_over() -> None:
    """Sequence 1 becomes sequence 0, and sequence 0 becomes sequence 2, in the cells that were just copied."""
    with make(n_seq_max=3, unified=False) as cache:
        for s in (0, 2):
            store_positions(cache, run(s, range(5)))
        scribble(cache)
        before = rows_of(cache)
        cache.seq_cp(0, 1)
        cache.seq_rm(0)
        cache.seq_cp(2, 0)
        cache.seq_rm(2)
        rows = rows_of(cache)
        assert held(cache, 1, rows) == [(p, before[p]) for p in range(5)]
        assert held(cache, 0, rows) == [(p, before[32 + p]) for p in range(5)]
