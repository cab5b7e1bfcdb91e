"""Two caches over one set of cells: what is stored beside a token stays beside it, whatever happens to the token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cell_state import state
from support.kv_scene import plan_batch, run, run_layer, store_positions
from support.naive_attention import NaiveKV
from support.naive_rope import naive_rope
from support.nmse import nmse
from support.rows_held import rows_held, scribble
from support.twin_scene import HEAD, ROPE, TURNED, TwinScene, make_twin

from pykv.errors import NoSlotError, ParamError, ShiftUnsupported, UseAfterCloseError
from pykv.ggml import Arena, Graph
from pykv.memory import AttentionPath, AttentionPlan, KVCache, KVSettings, LayerSpec, MemorySpec, UpdateStatus
from pykv.memory.twin import TwinCache

SEQ = st.integers(0, 2)
P = st.integers(-1, 12)
STEPS = st.one_of(
    st.tuples(st.just("decode"), SEQ, st.integers(1, 4)),
    st.tuples(st.just("seq_cp"), SEQ, SEQ, P, P),
    st.tuples(st.just("seq_rm"), st.integers(-1, 2), P, P),
    st.tuples(st.just("seq_add"), SEQ, P, P, st.integers(-3, 3)),
    st.tuples(st.just("seq_div"), SEQ, P, P, st.integers(1, 2)),
    st.tuples(st.just("seq_keep"), SEQ),
    st.tuples(st.just("update")),
)


def both(twin: TwinCache) -> list[Any]:
    """Return all figures and all bytes."""
    pairs = [pair for part in twin.parts for _, *pair in part.store.own_tensors()]
    return [state(twin.main.streams), *(t.raw_bytes().tobytes() for pair in pairs for t in pair if t is not None)]


@settings(max_examples=40, deadline=None)
@given(unified=st.booleans(), turned=st.booleans(), steps=st.lists(STEPS, min_size=4, max_size=16))
def test_random_programs(unified: bool, turned: bool, steps: list[tuple]) -> None:
    """Attention reads what each sequence holds, and the rows of the index are those of the same tokens."""
    with make_twin(24 if unified else 12, turned=turned, n_seq_max=3, unified=unified) as twin:
        scene = TwinScene(twin)
        for name, *args in steps:
            if name == "update":
                twin.update()
            elif name == "decode":
                decode(scene, *args)
            else:
                edit(scene, name, args)
            assert twin.index.streams is twin.main.streams
        scene.check_rows()
        for s in range(3):
            if decode(scene, s, 1):
                scene.check_rows()


def decode(scene: TwinScene, seq_id: int, n: int) -> bool:
    """Go on with a sequence, if there is room."""
    first = scene.twin.pos_max(seq_id) + 1
    if n > scene.naive.n_free(seq_id):
        return False
    assert scene.step(run(seq_id, range(first, first + n))) < 10 * TURNED
    return True


def edit(scene: TwinScene, name: str, args: list[int]) -> None:
    """Tell both; what is refused changes nothing."""
    held = [[(one.pos, one.token) for one in rows] for rows in scene.naive.held]
    before = state(scene.twin.main.streams)
    if name == "seq_add" and args[0] >= 0 and collides(scene, args):
        return  # two tokens at one position: their order among rows by position is nobody's
    try:
        getattr(scene.twin, name)(*args)
    except (NoSlotError, ShiftUnsupported):
        assert getattr(scene.naive, name)(*args) is False
        assert [[(one.pos, one.token) for one in rows] for rows in scene.naive.held] == held
        assert state(scene.twin.main.streams) == before
    else:
        assert getattr(scene.naive, name)(*args) is not False


def collides(scene: TwinScene, args: list[int]) -> bool:
    seq_id, p0, p1, delta = args
    at = [one.pos for one in scene.naive.held[seq_id]]
    moved = [p + delta if max(p0, 0) <= p and (p1 < 0 or p < p1) else p for p in at]
    return len(set(moved)) < len(moved)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("unified", [False, True])
def test_rows_follow_copies_and_shifts(unified: bool, turned: bool) -> None:
    with make_twin(32, turned=turned, n_seq_max=2, unified=unified) as twin:
        scene = TwinScene(twin)
        scene.step(run(0, range(8)))
        scene.edit("seq_cp", 0, 1, -1, -1)
        scene.edit("seq_rm", 1, 2, 5)
        scene.edit("seq_add", 1, 5, -1, -3)  # those that are shared are copied first
        assert twin.update() is UpdateStatus.SUCCESS
        assert twin.update() is UpdateStatus.NO_UPDATE
        scene.check_rows()
        assert scene.step([*run(1, range(5, 8)), *run(0, range(8, 11))]) < 5 * TURNED
        scene.check_rows()
        keys = twin.index.k(0, 1)[:, 0]
        assert keys.shape == (8, HEAD)
        expected = -twin.k(0, 1)[:, 0] if turned else twin.v(0, 1)[:, 0]
        assert np.abs(keys - expected).max() <= TURNED


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_snapshot_puts_both_rows_into_one_cell(turned: bool, on: str) -> None:
    """Also where the old cells are taken."""
    with make_twin(24, turned=turned, n_swa=5, n_seq_max=2) as twin:
        scene = TwinScene(twin)
        scene.step(run(0, range(9)))
        rows = [rows_held(part, 0) for part in twin.parts]
        kept = twin.snapshot(0, on=on)
        assert kept.nbytes == 4 * (len(rows[0][8]) + len(rows[1][8]))
        scene.edit("seq_rm", 0, 0, -1)
        scene.step(run(1, range(12)))
        twin.restore(0, kept)
        for part, own in zip(twin.parts, rows, strict=True):
            assert rows_held(part, 0) == {p: own[p] for p in (5, 6, 7, 8)}
        scene.check_rows()


def test_whole_sequences_across_streams() -> None:
    with make_twin(16, n_seq_max=3, unified=False) as twin:
        scene = TwinScene(twin)
        scene.step([*run(0, range(6)), *run(1, range(6))])
        scene.edit("seq_cp", 0, 2, -1, -1)
        scene.edit("seq_rm", 0, 0, -1)
        scene.check_rows()
        assert scene.step([*run(2, range(6, 8)), *run(0, range(2))]) < TURNED
        scene.check_rows()


def test_one_search_serves_both() -> None:
    with make_twin(16, n_seq_max=2) as twin:
        store_positions(twin, [*run(0, range(3)), *run(1, range(3))])
        twin.seq_rm(0, 1, 2)
        plan = plan_batch(twin, run(1, range(3, 14)), 4)
        assert [main is index for main, index in plan.slots] == [True, True, True]
        assert [main.idxs.tolist() for main, _ in plan.slots] == [[[1, 6, 7, 8]], [[9, 10, 11, 12]], [[13, 14, 15]]]
        before = twin.dump()
        plan.apply(0)
        assert twin.dump() == twin.index.dump() != before
        plan.retract(0)
        assert twin.dump() == twin.index.dump() == before
        assert plan_batch(twin, run(1, range(3, 15))) is None


def test_an_index_that_is_only_read_has_no_mask() -> None:
    with make_twin() as twin:
        plan = AttentionPlan.of(AttentionPath.FLASH)
        part = twin.graph(Graph(Arena(64, 64)), twin.full_shapes(4, plan)[0], plan)
        part.index.get_k(0)
        assert "kq_mask" not in [one.tensor.name for one in part.inputs]


# both or neither


def test_a_stream_without_room_changes_nothing() -> None:
    with make_twin(8, n_seq_max=2, unified=False) as twin:
        TwinScene(twin).step([*run(0, range(6)), *run(1, range(6))])
        twin.seq_add(1, 0, -1, 6)
        twin.update()
        before = both(twin)
        with pytest.raises(NoSlotError):
            twin.seq_cp(0, 1, 0, 3)
        assert both(twin) == before


def test_shared_cells_without_room_are_not_moved() -> None:
    with make_twin(6, n_seq_max=2) as twin:
        TwinScene(twin).step(run((0, 1), range(4)))
        before = both(twin)
        with pytest.raises(ShiftUnsupported, match="shared_cells"):
            twin.seq_add(0, 0, -1, 2)
        assert both(twin) == before


def test_clear_zeroes_both() -> None:
    with make_twin() as twin:
        for part in twin.parts:
            scribble(part)
        store_positions(twin, run(0, range(5)))
        twin.clear(data=False)
        assert twin.pos_max(0) == twin.index.pos_max(0) == -1
        assert any(any(data) for data in both(twin)[1:])
        twin.clear()
        assert not any(any(data) for data in both(twin)[1:])


def test_listeners_hear_of_a_verb_once() -> None:
    with make_twin(n_seq_max=2) as twin:
        heard: list[str] = []
        twin.listeners.append(lambda name, *_: heard.append(name))
        store_positions(twin, run(0, range(5)))
        twin.seq_cp(0, 1)
        twin.seq_add(1, 2, -1, 4)
        twin.seq_rm(-1, 3)
        twin.clear()
        assert heard == ["seq_cp", "seq_add", "seq_rm", "clear"]


# memory


@pytest.mark.parametrize("turned", [False, True])
def test_bytes(turned: bool) -> None:
    """Two layers of f32: K and V, and in the index 8 elements, or 8 and 1 of V."""
    with make_twin(32, turned=turned) as twin:
        assert (twin.main.nbytes, twin.index.nbytes) == (2 * 32 * 16 * 4, 2 * 32 * (9 if turned else 8) * 4)
        assert twin.nbytes == twin.main.nbytes + twin.index.nbytes
        names = [k.name for _, k, _ in twin.index.store.own_tensors()]
        assert names == ["cache_idx_k_l0", "cache_idx_k_l1"]


def test_the_index_closes_first_or_with_the_rest() -> None:
    twin = make_twin()
    twin.index.release()
    twin.main.tensors(0)[0].numpy()
    with pytest.raises(UseAfterCloseError):
        twin.seq_rm(0)
    twin.close()
    twin.close()
    twin = make_twin()
    twin.main.release()
    with pytest.raises(UseAfterCloseError):
        twin.index.tensors(0)
    twin.close()


def test_windows_that_differ() -> None:
    with make_twin(n_swa=4) as one, make_twin() as other:
        with pytest.raises(ParamError, match="index_spec: window="):
            TwinCache(one.spec, other.index.spec, KVSettings(8))
        with pytest.raises(ParamError, match="n_pos_per_embd=4 differs"):
            TwinCache(other.spec, replace(other.index.spec, n_pos_per_embd=4), KVSettings(8))


# a draft memory over a target memory


def test_a_draft_reads_the_target_and_its_own_rows_after_moves() -> None:
    """Layer 0 of the draft reads layer 1 of the target, layer 1 is its own; positions move under both."""
    layer = LayerSpec(1, HEAD, HEAD, ROPE)
    spec, kinds = MemorySpec.uniform(2, layer), KVSettings(16, 2, type_k="f32", type_v="f32")
    rng = np.random.default_rng(5)
    with KVCache(spec, kinds, n_threads=1) as target, KVCache(spec, kinds, other=target, share={0: 1}) as draft:
        plan = plan_batch(target, run(0, range(6)))
        where = (plan.apply(0), plan.slots[0], plan.ubatches[0])
        raw = {}
        for cache, il in ((target, 1), (draft, 1)):
            q, k, v = (rng.standard_normal((6, 1, HEAD)).astype(np.float32) for _ in range(3))
            turned = naive_rope(k, np.arange(6), n_dims=HEAD).astype(np.float32)
            run_layer(cache, AttentionPath.GROUPED, il, where, (q, turned, v))
            raw[cache] = (k, v)
        target.seq_rm(0, 1, 3)
        target.seq_add(0, 3, -1, -2)
        kept = [0, 3, 4, 5]
        plan = plan_batch(draft, run(0, [4]))
        plan_target = plan_batch(target, run(0, [4]))
        where = (plan_target.apply(0), plan_target.slots[0], plan_target.ubatches[0])
        assert plan.slots[0].idxs.tolist() == plan_target.slots[0].idxs.tolist()
        for il, cache in ((0, target), (1, draft)):
            q, k, v = (rng.standard_normal((1, 1, HEAD)).astype(np.float32) for _ in range(3))
            naive = NaiveKV(1 / np.sqrt(HEAD))
            olds = naive_rope(raw[cache][0][kept], np.arange(4), n_dims=HEAD)
            for p, (old_k, old_v) in enumerate(zip(olds, raw[cache][1][kept], strict=True)):
                naive.store(0, p, old_k, old_v)
            naive.store(0, 4, k[0], v[0])
            ours = run_layer(draft, AttentionPath.GROUPED, il, where, (q, k, v))
            assert nmse(ours[0], naive.attend(0, 4, q[0])) < 1e-6


def test_a_draft_leaves_snapshots_to_its_target() -> None:
    """Whose snapshots hold the rows of both."""
    window = make_twin(n_swa=4).spec
    kinds = KVSettings(16, type_k="f32", type_v="f32")
    with KVCache(window, kinds, n_threads=1) as target, KVCache(window, kinds, other=target, share={0: 0}) as draft:
        store_positions(target, run(0, range(8)))
        for seed, cache in enumerate((target, draft)):
            scribble(cache, seed)
        rows = [rows_held(cache, 0) for cache in (target, draft)]
        nothing, kept = draft.snapshot(0), target.snapshot(0)
        assert (nothing.nbytes, kept.nbytes) == (0, 3 * (len(rows[0][7]) + len(rows[1][7])))
        store_positions(target, run(0, range(8, 14)))
        before = state(target.streams)
        draft.restore(0, nothing)
        assert state(target.streams) == before
        for cache in (target, draft):
            scribble(cache, 9)
        target.restore(0, kept)
        for cache, own in zip((target, draft), rows, strict=True):
            assert rows_held(cache, 0) == {p: own[p] for p in (5, 6, 7)}
        draft.close()
        with pytest.raises(ParamError, match="of another kind"):
            target.restore(0, kept)
