"""The verbs of a KV cache, and public fault reports as small cases."""

from __future__ import annotations

import numpy as np
import pytest
from support.cell_state import state
from support.kv_scene import KVScene, plan_batch, run, store_positions
from support.nmse import nmse
from support.not_on import bound

from pykv.batch import Batch, BatchLimits, validate
from pykv.cells import SwaType, Window
from pykv.errors import BatchError, NoSlotError, ParamError, SequenceError, ShiftUnsupported, UseAfterCloseError
from pykv.ggml import RopeParams
from pykv.memory import AttentionPath, KVCache, KVSettings, LayerSpec, MemorySpec, UpdateStatus

SAME = bound(1e-12, 1e-6)
"""NMSE of the same sums in another order; with products rounded to f16 1.2e-7 was measured."""

LAYER = LayerSpec(1, 64, 64)
SPEC = MemorySpec.uniform(2, LAYER)
TURNED = MemorySpec.uniform(2, LayerSpec(1, 64, 64, RopeParams(64)))


def make(n_cells: int, spec: MemorySpec = SPEC, **settings) -> KVCache:
    return KVCache(spec, KVSettings(n_cells, **settings))


def positions(cache: KVCache, seq_id: int) -> list[int]:
    cells = cache.streams.cells[cache.streams.stream_of(seq_id)]
    return sorted(cells.pos[cells.member(seq_id)].tolist())


def raw(cache: KVCache) -> list[bytes]:
    """Return every byte of every K and V tensor."""
    return [tensor.raw_bytes().tobytes() for il in range(len(cache.spec.layers)) for tensor in cache.tensors(il)]


# allocation


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("v_trans", [True, False])
def test_tensors_have_the_shapes_and_names_of_llama_cpp(v_trans: bool, unified: bool) -> None:
    spec = MemorySpec((LayerSpec(1, 64, 32), LayerSpec(2, 64, 32)))
    with make(8, spec, n_seq_max=3, unified=unified, v_trans=v_trans) as cache:
        n = 1 if unified else 3
        shapes = [[tensor.ne for tensor in cache.tensors(il)] for il in (0, 1)]
        assert shapes == [
            [(64, 8, n, 1), (64 if v_trans else 32, 8, n, 1)],
            [(128, 8, n, 1), (64, 8, n, 1)],
        ]
        assert [tensor.name for il in (0, 1) for tensor in cache.tensors(il)] == [
            "cache_k_l0", "cache_v_l0", "cache_k_l1", "cache_v_l1"
        ]  # fmt: skip
        assert (cache.n_cells, cache.n_stream, cache.store.n_embd_v_max) == (8, n, 64)


def test_tag_goes_into_the_names() -> None:
    with make(8, tag="idx_") as cache:
        assert [tensor.name for tensor in cache.tensors(1)] == ["cache_idx_k_l1", "cache_idx_v_l1"]


@pytest.mark.parametrize("dtype", ["f32", "q4_0"])
def test_memory_is_zeroed_at_first_and_by_clear(dtype: str) -> None:
    with make(16, type_k=dtype, type_v=dtype) as cache:
        assert not any(map(any, raw(cache)))
        KVScene(cache, AttentionPath.FLASH, 1).step(run(0, range(5)))
        assert all(map(any, raw(cache)))
        cache.clear(data=False)
        assert all(map(any, raw(cache)))
        assert state(cache.streams) == state(make(16).streams)
        cache.clear()
        assert not any(map(any, raw(cache)))


# verbs


def test_any_sequence_removal_stopped_working() -> None:
    """Case A02."""
    with make(8, n_seq_max=2) as cache:
        store_positions(cache, run(0, range(3)))
        store_positions(cache, run(1, range(2)))
        assert cache.seq_rm(-1, 1, -1) is True
        assert cache.dump() == "0:0{0} 1:. 2:. 3:0{1}"
        assert cache.cells().n_used == 2
        assert cache.streams.heads == [1]
        assert cache.pos_max(0) == cache.pos_max(1) == 0
        store_positions(cache, [(0, 1)])
        assert cache.cells().pos[1] == 1
        before = state(cache.streams)
        for bad in (-2, 256):
            with pytest.raises(SequenceError):
                cache.seq_rm(bad, 0, -1)
        assert state(cache.streams) == before
        assert cache.seq_rm(-1, -1, -1) is True
        assert cache.cells().n_used == 0
        cache.check()


def test_streams_refuse_ids_that_have_none() -> None:
    with make(8, n_seq_max=2, unified=False) as cache:
        for verb, args in (
            ("seq_rm", (2, 0, -1)), ("seq_cp", (0, 2)), ("seq_cp", (2, 0)), ("seq_keep", (2,)),
            ("seq_add", (2, 0, -1, 1)), ("seq_div", (-1, 0, -1, 2)), ("pos_min", (2,)), ("pos_max", (-1,)),
        ):  # fmt: skip
            with pytest.raises(SequenceError):
                getattr(cache, verb)(*args)


def test_context_shift_lost_one_kept_token_too_many() -> None:
    """Keep 4 of 16, drop 6, slide 6: the bookkeeping of case A04."""
    with make(16) as cache:
        store_positions(cache, run(0, range(16)))
        cache.seq_rm(0, 4, 10)
        cache.seq_add(0, 10, 16, -6)
        assert positions(cache, 0) == list(range(10))
        pos = cache.cells().pos.tolist()
        assert pos == [0, 1, 2, 3, -1, -1, -1, -1, -1, -1, 4, 5, 6, 7, 8, 9]
        assert cache.cells().shift.tolist() == [0] * 10 + [-6] * 6
        assert (cache.cells().n_used, cache.pos_max(0)) == (10, 9)
        cache.check()


def test_small_window_cache_could_only_overwrite_its_smallest_position() -> None:
    """Overwriting any cell out of the window, older leftovers go too: case A08."""
    spec = MemorySpec((LAYER,), window=Window(2, SwaType.STANDARD))
    with make(5, spec, n_seq_max=2) as cache:
        for tokens in ([(0, 0)], run(1, range(2)), run(0, [1, 2])):
            store_positions(cache, tokens)
        cache.seq_rm(1)
        store_positions(cache, run(0, [3, 4]))
        assert cache.dump() == "0:0{0} 1:3{0} 2:4{0} 3:1{0} 4:2{0}"
        store_positions(cache, [(0, 5)])
        assert cache.dump() == "0:. 1:3{0} 2:4{0} 3:5{0} 4:2{0}"
        assert (cache.cells().n_used, cache.pos_min(0), cache.pos_max(0)) == (4, 2, 5)
        cache.check()


@pytest.mark.parametrize("path", AttentionPath)
def test_a_reused_window_cache_answers_like_a_full_one(path: AttentionPath) -> None:
    """Case A08: outputs equal those of a twin that never reuses a cell."""
    spec = MemorySpec((LAYER,), window=Window(4, SwaType.STANDARD))
    settings = {"n_seq_max": 2, "type_k": "f32", "type_v": "f32"}
    with make(8, spec, **settings) as small, make(64, spec, **settings) as full:
        scene, twin = KVScene(small, path, 2, seed=4), KVScene(full, path, 2, seed=4)
        for tokens in (run(0, range(5)), run(0, range(5, 8)), *([(0, p)] for p in range(8, 20)), run(0, range(20, 24))):
            ((ours, expected),) = scene.step(tokens)
            ((other, _),) = twin.step(tokens)
            assert nmse(ours, expected) < 1e-6
            # the fused path sums values in f16, in the order of the cells
            assert nmse(ours, other) < (1e-6 if path is AttentionPath.FLASH else SAME)
            assert positions(small, 0) == list(range(small.pos_min(0), small.pos_max(0) + 1))
        assert full.cells().n_used == 24
        assert small.cells().n_used <= 8


def test_a_batch_that_did_not_fit_left_the_cache_half_changed() -> None:
    """Case A12, with the loop that halves the batch and tries again."""
    with make(8) as cache:
        scene = KVScene(cache, AttentionPath.FLASH, 1)
        scene.step(run(0, range(5)), n_ubatch=2)
        before = (state(cache.streams), raw(cache))
        assert plan_batch(cache, run(0, range(5, 9)), n_ubatch=2) is None
        assert (state(cache.streams), raw(cache)) == before
        twin = state(cache.streams)
        stored, n, tries = 5, 4, []
        while n:
            fits = plan_batch(cache, run(0, range(stored, stored + n)), n_ubatch=2) is not None
            tries.append((n, fits))
            if fits:
                scene.step(run(0, range(stored, stored + n)), n_ubatch=2)
                stored += n
            else:
                n //= 2
        assert tries == [(4, False), (2, True), (2, False), (1, True), (1, False)]
        assert positions(cache, 0) == list(range(8))
        cache.check()
        cache.seq_rm(0, 5, -1)
        assert state(cache.streams)["pos"] == twin["pos"]
        store_positions(cache, run(0, range(5, 8)), n_ubatch=2)
        assert cache.cells().pos.tolist() == list(range(8))


def test_coupled_tokens_in_streams_said_no_slot_whatever_their_number() -> None:
    """A loop that halves the batch on "no slot" would never get anywhere: it is the batch that is wrong."""
    with make(8, n_seq_max=2, unified=False) as cache:
        valid = validate(Batch([1], seq_id=[(0, 1)]), BatchLimits(8, 2, 2), cache)
        with pytest.raises(BatchError, match="kv_unified=True"):
            cache.init_batch(valid, 8)
        assert cache.cells().n_used == 0


def test_part_of_a_sequence_replaces_that_part_in_another_stream() -> None:
    """The reference ends the process. What lies outside the range stays, in its cells."""
    with make(8, n_seq_max=2, unified=False) as cache:
        store_positions(cache, run(0, range(4)))
        store_positions(cache, run(1, range(6)))
        cache.seq_cp(0, 1, 0, 2)
        assert cache.dump(1) == "0:0{1} 1:1{1} 2:2{1} 3:3{1} 4:4{1} 5:5{1}"
        cache.seq_rm(1, 2, -1)
        cache.seq_cp(0, 1, 3, -1)
        assert positions(cache, 1) == [0, 1, 3]
        assert cache.dump(0) == "0:0{0} 1:1{0} 2:2{0} 3:3{0}"
        assert cache.update() is UpdateStatus.SUCCESS
        assert cache.update() is UpdateStatus.NO_UPDATE
        cache.check()


def test_a_copy_that_does_not_fit_into_its_stream_changes_nothing() -> None:
    with make(8, n_seq_max=2, unified=False) as cache:
        store_positions(cache, run(0, range(8)))
        store_positions(cache, run(1, range(3)))
        cache.seq_add(1, 0, -1, 10)
        cache.update()
        before = state(cache.streams)
        with pytest.raises(NoSlotError, match="8 cells of sequence 0, and stream 1 has room for 5"):
            cache.seq_cp(0, 1, 0, 10)
        assert state(cache.streams) == before
        cache.seq_cp(0, 1)
        assert positions(cache, 1) == list(range(8))


def test_a_plan_made_before_another_was_applied_overwrote_its_tokens() -> None:
    with make(8, n_seq_max=2) as cache:
        first, second = plan_batch(cache, run(0, range(3))), plan_batch(cache, run(1, range(2)))
        first.apply(0)
        before = state(cache.streams)
        with pytest.raises(ParamError, match="plan the batch anew"):
            second.apply(0)
        assert state(cache.streams) == before
        store_positions(cache, run(1, range(2)))
        assert cache.dump() == "0:0{0} 1:1{0} 2:2{0} 3:0{1} 4:1{1}"


def test_ubatches_are_applied_once_and_in_order() -> None:
    with make(8) as cache:
        plan = plan_batch(cache, run(0, range(4)), n_ubatch=2)
        for i in (1, -1, 2):
            with pytest.raises(ParamError, match=rf"i={i}: .* 0 is next"):
                plan.apply(i)
        plan.apply(0)
        with pytest.raises(ParamError, match=r"i=0: .* 1 is next"):
            plan.apply(0)
        plan.apply(1)
        assert positions(cache, 0) == list(range(4))


# pending work


def test_update_with_nothing_to_do() -> None:
    with make(8) as cache:
        assert cache.update() is UpdateStatus.NO_UPDATE


def test_moved_keys_are_turned_by_the_next_update_once() -> None:
    with make(8, TURNED) as cache:
        store_positions(cache, run(0, range(4)))
        cache.seq_add(0, 2, -1, 3)
        assert cache.cells().shift.tolist() == [0, 0, 3, 3, 0, 0, 0, 0]
        assert cache.update() is UpdateStatus.SUCCESS
        assert not cache.cells().shift.any()
        assert cache.update() is UpdateStatus.NO_UPDATE
        assert positions(cache, 0) == [0, 1, 5, 6]


def test_clear_forgets_shifts() -> None:
    with make(8, TURNED) as cache:
        store_positions(cache, run(0, range(4)))
        cache.seq_add(0, 2, -1, 3)
        cache.clear()
        assert cache.update() is UpdateStatus.NO_UPDATE


def test_keys_without_rotation_need_no_graph() -> None:
    with make(8) as cache:
        store_positions(cache, run(0, range(4)))
        cache.seq_div(0, 0, -1, 2)
        assert cache.update() is UpdateStatus.SUCCESS
        assert cache.update() is UpdateStatus.NO_UPDATE
        assert not cache.cells().shift.any()


def test_rows_follow_a_copied_stream_at_the_next_update() -> None:
    with make(8, n_seq_max=2, unified=False) as cache:
        KVScene(cache, AttentionPath.FLASH, 1).step(run(0, range(4)))
        before = raw(cache)
        cache.seq_cp(0, 1)
        assert cache.streams.pending_copies
        assert [tensor.raw_bytes().tobytes() for tensor in cache.store.tensors(0)] == before[:2]
        assert cache.update() is UpdateStatus.SUCCESS
        for tensor, old in zip((t for il in (0, 1) for t in cache.store.tensors(il)), before, strict=True):
            new, half = tensor.raw_bytes().tobytes(), len(old) // 2
            assert new == old[:half] * 2
        assert cache.update() is UpdateStatus.NO_UPDATE


def test_clear_forgets_copies() -> None:
    with make(8, n_seq_max=2, unified=False) as cache:
        store_positions(cache, run(0, range(4)))
        cache.seq_cp(0, 1)
        cache.clear()
        assert cache.update() is UpdateStatus.NO_UPDATE


REFUSALS = {
    "multi_dim_positions": MemorySpec((LAYER,), n_pos_per_embd=4),
    "absolute_positions": MemorySpec((LAYER,), absolute_positions=True),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_tokens_whose_positions_cannot_be_shifted(reason: str) -> None:
    """Case A19: asked, it says no and why; told to, it changes nothing."""
    with make(8, REFUSALS[reason]) as cache, make(8) as plain:
        assert plain.can_shift()
        assert plain.can_shift().reason is None
        assert not cache.can_shift()
        assert cache.can_shift().reason == reason
        before = state(cache.streams)
        for verb in ("seq_add", "seq_div"):
            with pytest.raises(ShiftUnsupported) as caught:
                getattr(cache, verb)(0, 2, 6, 2)
            assert caught.value.reason == reason
        assert state(cache.streams) == before
        cache.seq_rm(0, 1, -1)  # the other verbs do not ask


# placement


def test_the_answer_depended_on_which_cells_a_prompt_landed_in() -> None:
    """Case A15, both orders: sequence 1 sees its own cells and answers alike."""
    answers = []
    for order in ((0, 1), (1, 0)):
        with make(64, MemorySpec((LAYER,)), n_seq_max=2, type_k="f32", type_v="f32") as cache:
            scenes = {s: KVScene(cache, AttentionPath.GROUPED, 1, seed=s) for s in (0, 1)}
            for s in order:
                ((ours, expected),) = scenes[s].step(run(s, range(34 if s == 0 else 5)))
                assert nmse(ours, expected) < SAME
                if s == 1:
                    answers.append(ours)
            cells = np.flatnonzero(cache.cells().owners[1]).tolist()
            assert cells == (list(range(34, 39)) if order == (0, 1) else list(range(5)))
    assert nmse(answers[0], answers[1]) < SAME


# lifetime


def test_a_closed_cache_refuses_everything() -> None:
    cache = make(8)
    cache.close()
    cache.close()
    for verb, args in (
        ("seq_rm", (0,)), ("seq_cp", (0, 0)), ("seq_keep", (0,)), ("seq_add", (0, 0, -1, 1)), ("tensors", (0,)),
        ("seq_div", (0, 0, -1, 2)), ("pos_min", (0,)), ("pos_max", (0,)), ("clear", ()), ("update", ()),
    ):  # fmt: skip
        with pytest.raises(UseAfterCloseError):
            getattr(cache, verb)(*args)
    with pytest.raises(UseAfterCloseError):
        _ = cache.nbytes
    with pytest.raises(UseAfterCloseError), cache:
        pass


def test_streams_out_of_range() -> None:
    with make(8) as cache, pytest.raises(ParamError, match="stream = 1: must be an integer from 0 to 0"):
        cache.cells(1)


def test_a_cache_is_made_from_keywords_too() -> None:
    with KVCache(SPEC, n_cells=8, type_k="q8_0") as cache:
        assert cache.settings == KVSettings(8, type_k="q8_0")
    with pytest.raises(ParamError, match="n_cells is missing"):
        KVCache(SPEC)
    with pytest.raises(ParamError, match="n_cell: no such setting"):
        KVCache(SPEC, n_cell=8)
    with pytest.raises(ParamError, match="type_k: given beside settings"):
        KVCache(SPEC, KVSettings(8), type_k="f32")
