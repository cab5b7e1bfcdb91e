"""What a cut cannot bring back: kept, and put back to the byte, or not at all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cell_state import state
from support.iswa_memory import NEAR, both, make_iswa, positions, store
from support.kv_scene import plan_batch, run, store_positions
from support.memory_scene import MemoryScene
from support.rows_held import rows_held, scribble
from support.state_scene import StateScene, state_spec

from pykv._native import lib
from pykv.batch import Batch, BatchLimits, validate
from pykv.cells import SwaType, Window
from pykv.errors import BatchError, NoSlotError, ParamError, SequenceError, UseAfterCloseError
from pykv.ggml import RopeParams, tensor_rows
from pykv.memory import (
    HybridMemory,
    ISWACache,
    KVCache,
    KVSettings,
    LayerSpec,
    MemorySpec,
    RecurrentMemory,
    StateSpec,
    iswa,
)
from pykv.memory.guard import Guard
from pykv.memory.verb import step

ON = pytest.mark.parametrize("on", ["host", "device"])
FAR = SimpleNamespace(
    ggml_backend_buffer_is_host=lambda _: False,
    ggml_backend_view_init=lib.ggml_backend_view_init,
    ggml_backend_tensor_copy=lib.ggml_backend_tensor_copy,
)
"""What finds no memory that the CPU can reach."""
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
LAYOUTS = [(dtype, False) for dtype in TYPES] + [(dtype, True) for dtype in ("f32", "f16", "bf16")]
LAYER = LayerSpec(1, 32, 32, RopeParams(32))


@pytest.fixture(autouse=True)
def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let window caches be as small as the cases want them."""
    monkeypatch.setattr(iswa, "PAD", 1)


def store_tokens(memory: Any, seq_id: int, tokens: list[int]) -> None:
    """Write only the bookkeeping of tokens behind a sequence."""
    batch = Batch(tokens, pos=range(first := memory.pos_max(seq_id) + 1, first + len(tokens)), seq_id=seq_id)
    plan = memory.init_batch(validate(batch, BatchLimits(4096, 1000, memory.n_seq_max), memory), 512)
    for i in range(len(plan.ubatches)):
        plan.apply(i)


# windows


@ON
@pytest.mark.parametrize("unified", [True, False])
def test_a_window_that_has_moved_on_comes_back(on: str, unified: bool) -> None:
    """Tokens 7 to 9, which a next one sees, were overwritten twice; attention goes on as if nothing had been."""
    with make_iswa(64, n_seq_max=2, unified=unified) as memory:
        scene = MemoryScene(memory)
        assert scene.step(run(1, range(3))) < NEAR
        assert scene.step(run(0, range(10))) < NEAR
        rows = rows_held(memory.swa, 0)
        with memory.snapshot(0, on=on) as kept:
            assert (kept.position, kept.on) == (10, on)
            assert kept.nbytes == 3 * 2 * (8 + 4) * 4  # tokens x layers x (K and V) x f32
            assert scene.step(run(0, range(10, 40))) < NEAR
            assert memory.resumable(0, 10).reason == "window_gone"
            memory.restore(0, kept)
        scene.naive.seq_rm(0, 10, -1)
        memory.check()
        assert rows_held(memory.swa, 0) == {p: rows[p] for p in (7, 8, 9)}
        assert memory.resumable(0, 10)
        assert (memory.pos_max(0), positions(memory.base), positions(memory.swa, 1)) == (9, [*range(10)], [*range(3)])
        assert scene.step([*run(0, range(10, 16)), (1, 3)]) < NEAR


@ON
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("dtype", "v_trans"), LAYOUTS)
def test_bytes_of_every_type_and_layout(
    dtype: str, v_trans: bool, far: bool, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept in one layout of V and put back into the other one, where it can be turned."""
    if far:
        monkeypatch.setattr(tensor_rows, "lib", FAR)
    spec = MemorySpec((LayerSpec(2, 32, 32), LayerSpec(1, 64, 64)), window=Window(5, SwaType.STANDARD))
    with KVCache(spec, KVSettings(16, 2, type_k=dtype, type_v=dtype, v_trans=v_trans), n_threads=1) as cache:
        store_positions(cache, [*run(0, range(6)), *run(1, range(2)), *run(0, range(6, 9))])
        scribble(cache)
        rows = rows_held(cache, 0)
        kept = cache.snapshot(0, on=on)
        assert kept.nbytes == 4 * len(rows[8])
        store_positions(cache, run(0, range(9, 16)))
        if cache.store.can_turn_v:
            cache.store_v(not v_trans)
        scribble(cache, seed=1)
        other = rows_held(cache, 1)
        cache.restore(0, kept)
        assert rows_held(cache, 0) == {p: rows[p] for p in (5, 6, 7, 8)}
        assert rows_held(cache, 1) == other
        cache.check()


@pytest.mark.parametrize(
    ("window", "position", "seen"),
    [
        (Window(4, SwaType.STANDARD), 10, [7, 8, 9]),
        (Window(4, SwaType.STANDARD), 2, [0, 1]),
        (Window(1, SwaType.STANDARD), 6, []),
        (Window(4, SwaType.CHUNKED), 10, [8, 9]),
        (Window(4, SwaType.CHUNKED), 8, []),
        (Window(4, SwaType.SYMMETRIC), 10, [8, 9]),
    ],
)
def test_only_what_a_next_token_sees_is_kept(window: Window, position: int, seen: list[int]) -> None:
    with KVCache(MemorySpec((LAYER,), window=window), KVSettings(16), n_threads=1) as cache:
        store_positions(cache, run(0, range(position)))
        scribble(cache)
        rows = rows_held(cache, 0)
        kept = cache.snapshot(0)
        assert (kept.position, kept.nbytes) == (position, len(seen) * 2 * 64)
        cache.clear()
        cache.restore(0, kept)
        assert rows_held(cache, 0) == {p: rows[p] for p in seen}


def test_a_window_that_keeps_all_is_cut() -> None:
    with make_iswa(32, swa_full=True) as memory:
        store(memory, run(0, range(10)))
        kept = memory.snapshot(0)
        store(memory, run(0, range(10, 30)))
        memory.restore(0, kept)
        assert kept.nbytes == 0
        assert positions(memory.base) == positions(memory.swa) == [*range(10)]


@ON
def test_a_fork_goes_on_from_where_its_elder_was(on: str) -> None:
    """The cells are taken by then: copies lie elsewhere, and sums come in another order."""
    with make_iswa(64, n_seq_max=3) as memory:
        scene = MemoryScene(memory)
        scene.step(run(0, range(9)))
        kept = memory.snapshot(0, on=on)
        rows = rows_held(memory.swa, 0)
        scene.edit("seq_cp", 0, 1, -1, -1)
        scene.step(run(1, range(9, 25)))
        memory.restore(1, kept)
        scene.naive.seq_rm(1, 9, -1)
        memory.check()
        assert rows_held(memory.swa, 1) == {p: rows[p] for p in (6, 7, 8)}
        assert scene.step([*run(1, range(9, 13)), *run(0, range(9, 12))]) < NEAR


def test_a_fork_across_streams() -> None:
    with make_iswa(64, n_seq_max=2, unified=False) as memory:
        scene = MemoryScene(memory)
        scene.step(run(0, range(9)))
        kept = memory.snapshot(0)
        scene.edit("seq_cp", 0, 1, -1, -1)
        scene.step(run(1, range(9, 25)))
        memory.restore(1, kept)
        scene.naive.seq_rm(1, 9, -1)
        assert scene.step([*run(1, range(9, 13)), *run(0, range(9, 13))]) < NEAR


def test_rows_that_nobody_will_see_make_room() -> None:
    """No cell is free: sequence 1 has filled them all, and sees the last token only."""
    with make_iswa(32, n_swa=2, n_ubatch=3, n_seq_max=2) as memory:
        assert memory.swa.n_cells == 7
        store(memory, run(0, range(6)), 3)
        scribble(memory.swa)
        rows = rows_held(memory.swa, 0)
        kept = memory.snapshot(0)
        memory.swa.streams.seq_rm(0)
        store_positions(memory.swa, run(1, range(9)), 3)
        assert memory.swa.streams.cells[0].n_used == 7
        memory.restore(0, kept)
        memory.swa.check()  # and not that of both: `base` never had sequence 1
        assert rows_held(memory.swa, 0) == {5: rows[5]}
        assert positions(memory.swa, 1)[-1] == 8


def test_a_window_without_room_changes_nothing() -> None:
    with make_iswa(8, n_swa=4, n_ubatch=8, n_seq_max=3) as memory:
        store(memory, run(0, range(6)), 8)
        kept = memory.snapshot(0)
        store(memory, run(0, range(6, 8)), 8)
        memory.swa.streams.seq_rm(0)
        store_positions(memory.swa, [*run(1, range(3)), *run(2, range(3))])
        before = both(memory)
        with pytest.raises(NoSlotError, match="3 cells of a snapshot, and stream 0 has 2 free"):
            memory.restore(0, kept)
        assert both(memory) == before


def test_a_window_that_lacks_tokens_is_not_kept() -> None:
    with make_iswa(64) as memory:
        store(memory, run(0, range(40)))
        memory.seq_rm(0, 20)
        with pytest.raises(BatchError, match="cannot go on at 20"):
            memory.snapshot(0)


# what must still be there


def test_full_attention_keeps_nothing_and_is_cut() -> None:
    with KVCache(MemorySpec((LAYER,)), KVSettings(16), n_threads=1) as cache:
        store_tokens(cache, 0, [*range(8)])
        kept = cache.snapshot(0)
        assert (kept.position, kept.nbytes) == (8, 0)
        store_tokens(cache, 0, [90, 91])
        cache.restore(0, kept)
        assert cache.dump() == "0:0{0} 1:1{0} 2:2{0} 3:3{0} 4:4{0} 5:5{0} 6:6{0} 7:7{0}"


STALE = [
    (lambda memory: memory.seq_rm(0, 5), "sequence 0 lacks positions 5 to 7"),
    (lambda memory: memory.seq_rm(0, 2, 4), "sequence 0 lacks positions 2 to 3"),
    (lambda memory: memory.clear(), "sequence 0 lacks positions 0 to 7"),
    (lambda memory: memory.seq_add(0, 0, -1, 1), "sequence 0 lacks positions 0 to 0"),
    (lambda memory: (memory.seq_rm(0), store_tokens(memory, 0, [9] * 8)), "holds other tokens at the same positions"),
    (lambda memory: [memory.seq_add(0, 3, -1, d) for d in (4, -4)], "positions of sequence 0 have been moved"),
    (lambda memory: [memory.seq_add(0, 3, -1, d) for d in (4, -4)] + [memory.seq_cp(0, 1)], "of sequence 1 have been"),
]


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize(("change", "message"), STALE)
def test_a_stale_snapshot_changes_nothing(kind: str, change: Any, message: str) -> None:
    spec, settings = MemorySpec((LAYER,)), KVSettings(32, 2)
    whole = KVCache(spec, settings, n_threads=1) if kind == "full" else make_iswa(n_seq_max=2)
    with whole as memory:
        caches = [memory] if kind == "full" else list(memory.parts)
        store_tokens(memory, 0, [*range(8)])
        kept = memory.snapshot(0)
        change(memory)
        memory.update()
        before = [state(cache.streams) for cache in caches]
        with pytest.raises(ParamError, match=message):
            memory.restore(1 if "sequence 1" in message else 0, kept)
        assert [state(cache.streams) for cache in caches] == before


def test_the_same_tokens_decoded_anew_are_as_good() -> None:
    """Also after a move that is gone with them."""
    with KVCache(MemorySpec((LAYER,)), KVSettings(32, 2), n_threads=1) as cache:
        store_tokens(cache, 0, [*range(8)])
        kept = cache.snapshot(0)
        cache.seq_add(0, 0, -1, 3)
        cache.seq_rm(0)
        store_tokens(cache, 0, [*range(8), 20, 21])
        store_tokens(cache, 1, [*range(8), 22])
        for seq in (0, 1):
            cache.restore(seq, kept)
            assert cache.pos_max(seq) == 7


def test_holes_that_were_there_are_no_fault() -> None:
    with KVCache(MemorySpec((LAYER,)), KVSettings(32), n_threads=1) as cache:
        store_tokens(cache, 0, [*range(8)])
        cache.seq_rm(0, 2, 5)
        kept = cache.snapshot(0)
        store_tokens(cache, 0, [50] * 4)
        cache.restore(0, kept)
        assert [p for p in cache.cells().pos.tolist() if p >= 0] == [0, 1, 5, 6, 7]


def test_an_empty_sequence() -> None:
    with make_iswa(n_seq_max=2) as memory:
        kept = memory.snapshot(1)
        assert (kept.position, kept.nbytes) == (0, 0)
        store(memory, run(1, range(12)))
        memory.restore(1, kept)
        assert memory.pos_max(1) == -1
        memory.check()


# states


@ON
@pytest.mark.parametrize("n_rs_seq", [0, 2])
def test_a_state_comes_back(on: str, n_rs_seq: int) -> None:
    with RecurrentMemory(state_spec(), 3, n_rs_seq) as memory:
        scene = StateScene(memory)
        scene.decode([(0, t) for t in (1, 2, 3, 4)] + [(1, t) for t in (5, 6)])
        kept = memory.snapshot(0, on=on)
        assert (kept.position, kept.nbytes) == (4, 2 * (3 + 2) * 4)
        scene.decode([(0, 7), (1, 8), (0, 9), (2, 3)])
        memory.restore(0, kept)
        scene.tokens[0] = [1, 2, 3, 4]
        scene.check()
        scene.decode([(0, 3), (1, 4), (0, 5)])
        memory.restore(2, kept)  # another one may go on there as well
        scene.tokens[2] = [1, 2, 3, 4]
        scene.check()
        scene.decode([(2, 6), (0, 1)])
        scene.check()


def test_a_state_that_was_taken_back_is_kept_as_it_reads() -> None:
    """It lies in a plane behind the first, until the next token."""
    with RecurrentMemory(state_spec(), 2, 2) as memory:
        scene = StateScene(memory)
        scene.decode([(0, t) for t in (1, 2, 3, 4)])
        assert memory.seq_rm(0, 3)
        scene.tokens[0] = [1, 2, 3]
        kept = memory.snapshot(0)
        scene.decode([(0, 9), (0, 9)])
        memory.restore(0, kept)
        scene.tokens[0] = [1, 2, 3]
        scene.check()
        assert not memory.seq_rm(0, 2)  # nothing to go back to any more
        scene.decode([(0, 5)])


def test_a_shared_state_stays_with_the_other_one() -> None:
    with RecurrentMemory(state_spec(), 2) as memory:
        scene = StateScene(memory)
        scene.decode([(0, 1), (0, 2)])
        kept = memory.snapshot(0)
        scene.decode([(0, 3)])
        memory.seq_cp(0, 1)
        scene.tokens[1] = [1, 2, 3]
        memory.restore(0, kept)
        scene.tokens[0] = [1, 2]
        scene.check()
        empty = memory.snapshot(0)
        memory.seq_rm(0)
        nothing = memory.snapshot(0)
        memory.restore(0, empty)
        scene.check()
        memory.restore(0, nothing)
        assert memory.pos_max(0) == -1


BOTH = LayerSpec(1, 8, 8, state=StateSpec(3, 4))


def make_hybrid(window: bool) -> HybridMemory:
    """Return layers that attend and have states; of two, one has a window."""
    guard, settings = Guard(), KVSettings(64, 2, type_k="f32", type_v="f32")
    if not window:
        spec = MemorySpec((BOTH, BOTH))
        attention: Any = KVCache(spec, settings, n_threads=1, guard=guard)
    else:
        layers = (BOTH, LayerSpec(1, 8, 8, is_swa=True, state=StateSpec(3, 4)))
        spec = MemorySpec(layers, window=Window(4, SwaType.STANDARD))
        attention = ISWACache(spec, settings, n_ubatch=4, n_threads=1, guard=guard)
    return HybridMemory(spec, attention, RecurrentMemory(spec, 2, guard=guard))


def stored_states(memory: HybridMemory, seq_id: int) -> list[list[float]]:
    return [read(il, seq_id).tolist() for il in (0, 1) for read in (memory.r, memory.s)]


def scribble_states(memory: HybridMemory, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for il in (0, 1):
        for tensor in memory.recurrent.tensors(il):
            tensor.set(rng.standard_normal(tensor.n_elements).astype(np.float32))


@ON
@pytest.mark.parametrize("window", [False, True])
def test_both_kinds_at_once(window: bool, on: str) -> None:
    with make_hybrid(window) as memory:
        store_positions(memory, run(0, range(10)), 4)
        swa = memory.attention.swa if window else None
        scribble_states(memory, 1)
        if swa is not None:
            scribble(swa)
        states, rows = stored_states(memory, 0), swa and rows_held(swa, 0)
        kept = memory.snapshot(0, on=on)
        assert kept.nbytes == 2 * (3 + 4) * 4 + (3 * (8 + 8) * 4 if window else 0)
        store_positions(memory, [*run(0, range(10, 30)), *run(1, range(3))], 4)
        assert not memory.seq_rm(0, 10)
        scribble_states(memory, 2)
        memory.restore(0, kept)
        assert stored_states(memory, 0) == states
        assert memory.pos_max(0) == memory.recurrent.pos_max(0) == 9
        if swa is not None:
            assert rows_held(swa, 0) == {p: rows[p] for p in (7, 8, 9)}
        store_positions(memory, run(0, range(10, 14)), 4)
        memory.check()


@pytest.mark.parametrize("window", [False, True])
def test_a_part_that_refuses_keeps_the_others_as_they_are(window: bool) -> None:
    with make_hybrid(window) as memory:
        store_positions(memory, run(0, range(10)), 4)
        kept = memory.snapshot(0)
        store_positions(memory, run(0, range(10, 20)), 4)
        step(memory.attention.seq_rm)(0, 3, 5)
        before = memory.dump()
        with pytest.raises(ParamError, match="lacks positions 3 to 4"):
            memory.restore(0, kept)
        assert memory.dump() == before


def test_parts_that_end_apart() -> None:
    with make_hybrid(window=True) as memory:
        store_positions(memory, run(0, range(10)), 4)
        step(memory.attention.seq_rm)(0, 8)
        with pytest.raises(ParamError, match="its state ends before 10, and what is attended to before 8"):
            memory.snapshot(0)


# the object


@ON
def test_it_outlives_the_memory_and_is_closed_once(on: str) -> None:
    with make_iswa() as memory:
        store(memory, run(0, range(9)))
        scribble(memory.swa)
        rows = rows_held(memory.swa, 0)
        kept = memory.snapshot(0, on=on)
    with make_iswa() as memory:  # another one of the same kind, which has decoded the same
        store(memory, run(0, range(20)))
        memory.restore(0, kept)
        assert rows_held(memory.swa, 0) == {p: rows[p] for p in (6, 7, 8)}
        before = both(memory)
        kept.close()
        kept.close()
        assert (kept.closed, kept.nbytes) == (True, 0)
        with pytest.raises(UseAfterCloseError, match="the snapshot is closed"):
            memory.restore(0, kept)
        assert both(memory) == before
    with pytest.raises(UseAfterCloseError):
        memory.snapshot(0)


@pytest.mark.parametrize("other", [{"type_k": "q8_0"}, {"type_v": "bf16"}, {"n_swa": 5}])
def test_a_memory_of_another_kind(other: dict[str, Any]) -> None:
    def make(n_swa: int = 4, **settings: Any) -> ISWACache:
        spec = MemorySpec((LAYER, replace(LAYER, is_swa=True)), window=Window(n_swa, SwaType.STANDARD))
        return ISWACache(spec, KVSettings(32, **settings), n_ubatch=4, n_threads=1)

    with make() as one, make(**other) as two, RecurrentMemory(state_spec()) as states:
        for each in (one, two):
            store(each, run(0, range(9)))
        kept = one.snapshot(0)
        before = both(two)
        for another in (two, states):
            with pytest.raises(ParamError, match="of another kind, or one whose layers, types or window differ"):
                another.restore(0, kept)
        assert both(two) == before


def test_arguments() -> None:
    with make_iswa() as memory:
        with pytest.raises(ParamError, match="on='disk': must be 'host' or 'device'"):
            memory.snapshot(0, on="disk")
        with pytest.raises(SequenceError, match="seq_id = 1"):
            memory.snapshot(1)
        with pytest.raises(ParamError, match="snapshot=b'': must be a Snapshot"):
            memory.restore(0, b"")
        with pytest.raises(SequenceError, match="seq_id = 7"):
            memory.restore(7, memory.snapshot(0))


def test_a_plan_from_before_is_refused() -> None:
    with make_iswa() as memory:
        store(memory, run(0, range(9)))
        kept = memory.snapshot(0)
        plan = plan_batch(memory, run(0, [9]))
        memory.restore(0, kept)
        with pytest.raises(ParamError, match="the cells have changed"):
            plan.apply(0)


def test_listeners_hear_of_it_once() -> None:
    with make_iswa() as memory:
        heard: list[tuple] = []
        memory.listeners.append(lambda *call: heard.append(call))
        kept = memory.snapshot(0)
        memory.restore(0, kept)
        assert heard == [("restore", (0, kept), None)]


def test_queued_moves_come_first() -> None:
    """Rows are kept as they will be read: turned, and in the cells that own them."""
    with make_iswa(64, n_seq_max=2) as memory:
        scene = MemoryScene(memory)
        scene.step(run(0, range(9)))
        scene.edit("seq_add", 0, 0, -1, 3)
        kept = memory.snapshot(0)
        scene.step(run(0, range(12, 30)))
        memory.restore(0, kept)
        scene.naive.seq_rm(0, 12, -1)
        assert scene.step(run(0, range(12, 17))) < 1e-4  # turned twice
