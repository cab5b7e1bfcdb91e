"""Two caches as one memory: sizes, splits, what a window keeps, what is refused, and verbs that both do or neither."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.iswa_memory import LAYERS, NEAR, both, make_iswa, positions, store, words
from support.kv_scene import plan_batch, run
from support.memory_scene import MemoryScene
from support.resume_runs import spread

from pykv.batch import Batch, BatchLimits, validate
from pykv.cells import SwaType, Window
from pykv.errors import BatchError, NoSlotError, ParamError, SequenceError, ShiftUnsupported, UseAfterCloseError
from pykv.ggml import RopeParams
from pykv.memory import (
    AttentionPath,
    ISWACache,
    KVSettings,
    LayerSpec,
    MemorySpec,
    UpdateStatus,
    iswa,
)
from pykv.memory.verb import step

ROUNDED = 5e-3
"""How far outputs may be off with keys, values and weights in f16; a token too many or too few costs 0.05 and more."""


@pytest.fixture(autouse=True)
def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let window caches be as small as the cases want them."""
    monkeypatch.setattr(iswa, "PAD", 1)


# splits


def split(memory: ISWACache, tokens, n_ubatch: int) -> list[list[int]] | None:
    plan = plan_batch(memory, tokens, n_ubatch)
    return None if plan is None else [one.batch_idxs.tolist() for one in plan.ubatches]


def test_one_stream_splits_as_the_batch_comes() -> None:
    with make_iswa(n_seq_max=2) as memory:
        tokens = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1)]
        assert split(memory, tokens, 3) == [[0, 1, 2], [3, 4]]
        assert both(memory)[0]["n_used"] == [0]


def test_one_stream_splits_by_sequence_where_the_window_lacks_room() -> None:
    """Six tokens at once do not fit into five cells of a window of one; two, and then four, do."""
    with make_iswa(n_seq_max=2, n_swa=1, n_ubatch=3) as memory:
        assert memory.swa.n_cells == 5
        tokens = [*run(0, range(5)), (1, 0)]
        before = both(memory)
        assert split(memory, tokens, 6) == [[0, 5], [1, 2, 3, 4]]
        assert both(memory) == before


def test_streams_split_by_sequence() -> None:
    with make_iswa(n_seq_max=3, unified=False) as memory:
        tokens = [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2)]
        assert split(memory, tokens, 4) == [[0, 3, 4], [1, 2]], "descending ids do not stand together"
        with pytest.raises(BatchError, match="kv_unified"):
            plan_batch(memory, [((0, 1), 0)])


@pytest.mark.parametrize("unified", [True, False])
def test_no_room_changes_nothing(unified: bool) -> None:
    with make_iswa(8, n_seq_max=2, unified=unified) as memory:
        store(memory, run(0, range(6)))
        before = both(memory)
        assert plan_batch(memory, run(0, range(6, 14))) is None
        assert both(memory) == before
        with pytest.raises(BatchError):
            plan_batch(memory, run(0, [9]))
        assert both(memory) == before


# windows


@pytest.mark.parametrize("path", [AttentionPath.GROUPED, AttentionPath.FLASH])
@pytest.mark.parametrize("unified", [True, False])
def test_layers_see_what_their_kind_sees(path: AttentionPath, unified: bool) -> None:
    near, v_trans = (NEAR, True) if path is AttentionPath.GROUPED else (ROUNDED, False)
    with make_iswa(64, n_seq_max=2, unified=unified, v_trans=v_trans) as memory:
        scene = MemoryScene(memory, path)
        assert scene.step(run(0, range(11))) < near
        assert scene.step([*run(1, range(9)), *run(0, range(11, 15))]) < near
        for p in range(15, 25):
            assert scene.step([(1, p - 6), (0, p)]) < near
            memory.check()
        assert memory.visible(0, 24) == {"full": pytest.approx(range(25)), "standard": pytest.approx([21, 22, 23, 24])}
        assert [positions(memory.base, s) for s in (0, 1)] == [list(range(25)), list(range(19))]


def test_a_window_cache_could_not_place_tokens_over_older_ones() -> None:
    """Any cell out of the window is taken, and older leftovers go too, so that there is no hole. Case A08."""
    with make_iswa(16, n_swa=2, n_ubatch=1, n_seq_max=2) as memory:
        assert memory.swa.n_cells == 5
        scene = MemoryScene(memory)
        for tokens in ([(0, 0)], run(1, range(2)), run(0, range(1, 3))):
            assert scene.step(tokens) < NEAR
        scene.edit("seq_rm", 1, -1, -1)
        assert scene.step(run(0, range(3, 5))) < NEAR
        assert words(memory.swa) == "0:0{0} 1:3{0} 2:4{0} 3:1{0} 4:2{0}"
        assert scene.step([(0, 5)]) < NEAR
        assert words(memory.swa) == "1:3{0} 2:4{0} 3:5{0} 4:2{0}"
        assert memory.swa.cells().n_used == 4
        assert (memory.swa.pos_min(0), memory.swa.pos_max(0)) == (2, 5)
        assert (memory.pos_min(0), memory.pos_max(0)) == (0, 5)
        assert memory.visible(0, 5)["standard"].tolist() == [4, 5]


def test_forks_filled_a_window_cache_with_what_nobody_sees() -> None:
    """A cell of two sequences is free again once both are past it."""
    with make_iswa(200, n_swa=3, n_ubatch=4, n_seq_max=3) as memory:
        scene = MemoryScene(memory)
        assert scene.step(run(0, range(30))) < NEAR
        for turn in range(5):
            for dst in (1, 2):
                scene.edit("seq_rm", dst, -1, -1)
                scene.edit("seq_cp", 0, dst, -1, -1)
            at = 30 + 6 * turn
            for p in range(at, at + 6):
                assert scene.step([(s, p) for s in range(3)]) < NEAR
        memory.check()


def test_a_shift_took_one_rope_for_all_layers() -> None:
    """Each layer turns by its own dims and base, and windows go by positions, not by cells. Case A07."""
    layers = LayerSpec(1, 4, 2, RopeParams(4, freq_base=1e6)), LayerSpec(1, 4, 2, RopeParams(2), is_swa=True)
    spec = MemorySpec(layers, window=Window(4, SwaType.STANDARD))
    settings = KVSettings(8, type_k="f32", type_v="f32", v_trans=True)
    with ISWACache(spec, settings, n_ubatch=4, swa_full=True, n_threads=1) as memory:
        scene = MemoryScene(memory, key=(1, 0, 1, 0))
        scene.step(run(0, range(6)))
        scene.edit("seq_rm", 0, 0, 2)
        assert memory.can_shift()
        scene.edit("seq_add", 0, 2, 6, -2)
        assert memory.update() is UpdateStatus.SUCCESS
        assert np.abs(memory.k(0, 0)[3, 0] - [-0.98999, 0.14112, 1.0, 0.00300]).max() < NEAR
        assert np.abs(memory.k(1, 0)[3, 0] - [-0.98999, 0.14112, 1, 0]).max() < NEAR
        assert scene.step(run(0, range(4, 8))) < NEAR
        assert {kind: seen.tolist() for kind, seen in memory.visible(0, 7).items()} == {
            "full": list(range(8)),
            "standard": [4, 5, 6, 7],
        }
        assert memory.swa.dump() == "0:4{0} 1:5{0} 2:0{0} 3:1{0} 4:2{0} 5:3{0} 6:6{0} 7:7{0}"


# positions and going on


def one_by_one(scene: MemoryScene, first: int, end: int) -> None:
    for p in range(first, end):
        assert scene.step([(0, p)]) < NEAR


def test_a_cut_behind_the_window_left_a_sequence_without_an_end() -> None:
    """It ends where the full layers say; decoding is refused until what the window needs is there. Case A10."""
    with make_iswa(32, n_swa=4, n_ubatch=4) as memory:
        assert memory.swa.n_cells == 8
        scene = MemoryScene(memory)
        one_by_one(scene, 0, 20)
        scene.edit("seq_rm", 0, 6, -1)
        assert (positions(memory.base), positions(memory.swa)) == (list(range(6)), [])
        assert (memory.pos_min(0), memory.pos_max(0)) == (0, 5)
        answer = memory.resumable(0, 6)
        assert (bool(answer), answer.largest, answer.reason) == (False, 0, "window_gone")
        assert "3 to 5" in answer.detail
        before = both(memory)
        batch = Batch([1, 1])
        limits = BatchLimits(n_tokens_max=8, n_vocab=2, n_seq_max=1)
        with pytest.raises(BatchError, match=r"sequence 0 cannot go on at 6: 3 of .* 3 to 5, .* remove it from 0 on"):
            memory.init_batch(validate(batch, limits, memory), 4)
        assert both(memory) == before
        scene.edit("seq_rm", 0, 0, -1)
        assert scene.step(run(0, range(8))) < NEAR
        assert memory.base.cells().n_used == 8
        assert positions(memory.base) == list(range(8))


def test_where_tokens_have_several_positions_all_cuts_were_called_resumable() -> None:
    """Decoding then refused those whose window had been overwritten."""
    spec, settings = MemorySpec(LAYERS, Window(4, SwaType.STANDARD), n_pos_per_embd=4), KVSettings(32)
    for cut in range(12, 20):
        with ISWACache(spec, settings, n_ubatch=4, n_threads=1) as memory:
            for p in range(20):
                store(memory, [(0, p)])
            memory.seq_rm(0, cut, -1)
            answer = memory.resumable(0, cut)
            assert (bool(answer), answer.largest) == ((True, cut) if cut >= 15 else (False, 0))
            if not answer:
                assert f"needs positions {cut - 3} to" in answer.detail
                with pytest.raises(BatchError, match="remove it from 0 on"):
                    plan_batch(memory, [(0, cut)])
            else:
                assert plan_batch(memory, [(0, cut + 3)])  # behind a picture


@pytest.mark.parametrize("cut", range(12, 20))
def test_a_cut_inside_the_window_goes_on(cut: int) -> None:
    """Cuts to 15 and up find positions cut - 3 to cut - 1; those below do not. Case A10."""
    with make_iswa(32, n_swa=4, n_ubatch=4) as memory:
        scene = MemoryScene(memory)
        one_by_one(scene, 0, 20)
        scene.edit("seq_rm", 0, cut, -1)
        assert bool(memory.resumable(0, cut)) is (cut >= 15)
        if cut < 15:
            with pytest.raises(BatchError, match="remove it from 0 on"):
                plan_batch(memory, [(0, cut)])
        else:
            one_by_one(scene, cut, 22)
        memory.check()


def test_rounds_of_cutting_and_decoding_leak_no_cells() -> None:
    with make_iswa(32, n_swa=4, n_ubatch=4) as memory:
        scene = MemoryScene(memory)
        one_by_one(scene, 0, 20)
        for _ in range(5):
            scene.edit("seq_rm", 0, 17, -1)
            one_by_one(scene, 17, 20)
            assert memory.base.cells().n_used == 20
            assert positions(memory.base) == list(range(20))
            assert memory.swa.cells().n_used <= 8


def test_a_removed_sequence_begins_anywhere() -> None:
    with make_iswa() as memory:
        store(memory, run(0, range(20)))
        memory.seq_rm(0)
        store(memory, run(0, range(100, 104)))
        assert (memory.pos_min(0), memory.pos_max(0)) == (100, 103)


def test_what_a_caller_removed_on_purpose_is_not_missed() -> None:
    """Holes inside the window stay holes, in both caches; only what was overwritten is refused."""
    with make_iswa() as memory:
        scene = MemoryScene(memory)
        assert scene.step(run(0, range(12))) < NEAR
        scene.edit("seq_rm", 0, 9, 11)
        assert not memory.resumable(0, 12)
        one_by_one(scene, 12, 16)


def test_a_token_of_two_sequences_counts_for_both() -> None:
    with make_iswa(64, n_seq_max=2) as memory:
        store(memory, run((0, 1), range(30)))
        memory.seq_rm(-1, 20, -1)
        assert positions(memory.swa, 1) == [18, 19]
        with pytest.raises(BatchError, match="cannot go on at 20: 1 of"):
            plan_batch(memory, [((0, 1), 20)])


def test_a_copy_of_what_the_window_has_lost_cannot_go_on() -> None:
    for unified in (True, False):
        with make_iswa(64, n_seq_max=2, unified=unified) as memory:
            scene = MemoryScene(memory)
            assert scene.step(run(0, range(40))) < NEAR
            scene.edit("seq_cp", 0, 1, 0, 20)
            assert (memory.pos_max(1), positions(memory.swa, 1)) == (19, [])
            with pytest.raises(BatchError, match="sequence 1 cannot go on at 20"):
                plan_batch(memory, [(1, 20)])
            scene.edit("seq_cp", 0, 1, 20, -1)
            assert scene.step([(1, 40), (0, 40)]) < NEAR


def test_a_context_shift_keeps_the_window() -> None:
    """The first tokens stay, the rest moves down; the window moves with it."""
    with make_iswa(40) as memory:
        scene = MemoryScene(memory)
        assert scene.step(run(0, range(30))) < NEAR
        scene.edit("seq_rm", 0, 4, 16)
        scene.edit("seq_add", 0, 16, -1, -12)
        assert scene.step(run(0, range(18, 24))) < NEAR
        memory.check()


def test_a_shift_that_brings_overwritten_tokens_into_sight_is_noticed() -> None:
    with make_iswa(40) as memory:
        scene = MemoryScene(memory)
        assert scene.step(run(0, range(30))) < NEAR
        scene.edit("seq_rm", 0, 4, 28)
        scene.edit("seq_add", 0, 28, -1, -24)
        assert (positions(memory.base), positions(memory.swa)) == ([0, 1, 2, 3, 4, 5], [4, 5])
        with pytest.raises(BatchError, match="cannot go on at 6: 1 of the tokens at positions 3 to 5"):
            plan_batch(memory, [(0, 6)])


@pytest.mark.parametrize("unified", [True, False])
def test_with_room_for_all_every_cut_goes_on(unified: bool) -> None:
    """Holes are filled before anything is overwritten, so that both caches hold the same."""
    with make_iswa(32, n_seq_max=2, unified=unified, swa_full=True) as memory:
        scene = MemoryScene(memory)
        assert scene.step([*run(0, range(20)), *run(1, range(3))]) < NEAR
        scene.edit("seq_rm", 0, 0, 5)
        assert scene.step(run(0, range(20, 26))) < NEAR
        assert memory.base.dump() == memory.swa.dump()
        scene.edit("seq_rm", 0, 9, -1)
        assert scene.step([(0, 9), (1, 3)]) < NEAR
        assert all(spread(memory.resume_points(1, 4), 4))


# verbs of both or of neither


VERBS = [("seq_cp", (0, 1, 2, 7)), ("seq_add", (0, 0, -1, 3)), ("seq_div", (0, 0, -1, 2))]


@pytest.mark.parametrize(("verb", "args"), VERBS)
@pytest.mark.parametrize("unified", [True, False])
def test_a_verb_that_fails_in_the_second_cache_is_undone_in_both(
    monkeypatch: pytest.MonkeyPatch, verb: str, args: tuple, unified: bool
) -> None:
    """Whatever the second one has changed before it failed."""
    with make_iswa(32, n_seq_max=2, unified=unified) as memory:
        store(memory, [*run(0, range(8)), *run(1, range(8))])
        before, act = both(memory), step(getattr(memory.swa, verb))

        def fail(*args: int) -> None:
            act(*args)
            raise NoSlotError("no room in the window")

        monkeypatch.setattr(memory.swa, verb, fail)
        with pytest.raises(NoSlotError, match="in the window"):
            getattr(memory, verb)(*args)
        assert both(memory) == before
        assert memory.update() is UpdateStatus.NO_UPDATE
        memory.check()


@pytest.mark.parametrize(("verb", "args"), VERBS[1:])
def test_a_move_of_shared_cells_without_room_is_in_neither(verb: str, args: tuple) -> None:
    with make_iswa(10, n_swa=2, n_ubatch=16, n_seq_max=2) as memory:
        store(memory, run((0, 1), range(10)), n_ubatch=10)
        before = both(memory)
        with pytest.raises(ShiftUnsupported, match="shares"):
            getattr(memory, verb)(*args)
        assert both(memory) == before


def test_a_copy_without_room_is_in_neither() -> None:
    with make_iswa(12, n_swa=6, n_ubatch=2, n_seq_max=2, unified=False) as memory:
        for s in (0, 1):
            store(memory, run(s, range(8)), n_ubatch=2)
        memory.seq_add(1, 0, -1, 8)
        before = both(memory)
        with pytest.raises(NoSlotError, match="room"):
            memory.seq_cp(0, 1, 0, 8)
        assert both(memory) == before


def test_a_fork_could_not_shift_once_the_window_cache_was_full() -> None:
    """It forgets what nobody sees, and has room for the copies that the mover needs."""
    with make_iswa(60, n_swa=4, n_ubatch=4, n_seq_max=2) as memory:
        scene = MemoryScene(memory)
        assert scene.step(run(0, range(20))) < NEAR
        scene.edit("seq_cp", 0, 1, -1, -1)
        assert memory.swa.cells().n_used == memory.swa.n_cells
        scene.edit("seq_rm", 0, 2, 10)
        scene.edit("seq_add", 0, 10, -1, -8)
        assert scene.step([(0, 12), (1, 20)]) < NEAR
        scene.edit("seq_div", 1, 0, -1, 2)
        assert scene.step([(0, 13)]) < NEAR
        memory.check()


def test_a_copy_into_another_stream_brings_what_the_window_shows() -> None:
    with make_iswa(32, n_seq_max=2, unified=False) as memory:
        scene = MemoryScene(memory)
        for s in (0, 1):
            assert scene.step(run(s, range(8))) < NEAR
        scene.edit("seq_add", 1, 0, -1, 8)
        scene.edit("seq_cp", 0, 1, 0, 8)
        assert scene.step([(0, 8), (1, 16)]) < NEAR


WRONG = [
    ("seq_rm", (7,), SequenceError),
    ("seq_rm", (0, "x", 3), ParamError),
    ("seq_cp", (0, 9), SequenceError),
    ("seq_cp", (-1, 0), SequenceError),
    ("seq_keep", (-1,), SequenceError),
    ("seq_add", (0, 0, -1, 1.5), ParamError),
    ("seq_add", (0, 0, -1, 2**31), ParamError),
    ("seq_div", (0, 0, -1, 0), ParamError),
    ("clear", ("yes",), ParamError),
    ("k", (9, 0), ParamError),
    ("tensors", (-1,), ParamError),
    ("resumable", (0, -1), ParamError),
    ("pos_max", (2,), SequenceError),
]


@pytest.mark.parametrize(("name", "args", "error"), WRONG)
def test_wrong_arguments_change_nothing(name: str, args: tuple, error: type[Exception]) -> None:
    with make_iswa(32, n_seq_max=2) as memory:
        store(memory, [*run(0, range(12)), *run(1, range(3))])
        before = both(memory)
        with pytest.raises(error):
            getattr(memory, name)(*args)
        assert both(memory) == before


def test_a_verb_is_told_once() -> None:
    heard: list[tuple] = []
    with make_iswa(32, n_seq_max=2) as memory:
        store(memory, run(0, range(12)))
        memory.listeners.append(lambda *call: heard.append(call))
        memory.seq_cp(0, 1)
        memory.seq_rm(1, 3)
        memory.seq_add(0, 2, -1, 4)
        memory.seq_keep(0)
        assert heard == [
            ("seq_cp", (0, 1, -1, -1), None),
            ("seq_rm", (1, 3, -1), True),
            ("seq_add", (0, 2, -1, 4), None),
            ("seq_keep", (0,), None),
        ]


def test_a_closed_memory_refuses() -> None:
    memory = make_iswa(32, n_seq_max=2)
    store(memory, run(0, range(5)))
    memory.close()
    memory.close()
    calls = [
        memory.clear, memory.update, memory.dump, memory.check, memory.cells,
        lambda: memory.seq_rm(0), lambda: memory.seq_cp(0, 1), lambda: memory.pos_max(0), lambda: memory.k(0, 0),
        lambda: memory.v(1, 0), lambda: memory.visible(0, 3), lambda: memory.resumable(0, 3), lambda: memory.nbytes,
        lambda: plan_batch(memory, [(0, 5)]), lambda: memory.seen(0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UseAfterCloseError):
            call()


# looking at it


def test_both_halves_can_be_looked_at() -> None:
    with make_iswa(32, n_swa=4, n_ubatch=2) as memory:
        scene = MemoryScene(memory)
        one_by_one(scene, 0, 9)
        assert memory.swa.n_cells == 6
        base, swa = memory.dump().splitlines()
        assert base == "base " + " ".join(f"{p}:{p}{{0}}" for p in range(9))
        assert swa == "swa  0:6{0} 1:7{0} 2:8{0} 3:3{0} 4:4{0} 5:5{0}"
        assert memory.used == "without a window 9 of 32 cells used; with one 6 of 6 cells used"
        for il, n_left in ((0, 9), (1, 6), (2, 6), (3, 9)):
            k, v = memory.k(il, 0), memory.v(il, 0)
            raw = [scene.raw[p][il] for p in range(9 - n_left, 9)]
            assert (k.shape, v.shape) == ((n_left, 1, 8), (n_left, 1, 4))
            assert np.abs(memory.k(il, 0, derotate=True) - np.array([one for one, _ in raw])).max() < NEAR
            assert np.array_equal(v, np.array([one for _, one in raw]))
        assert [memory.half(il) is memory.swa for il in range(4)] == [False, True, True, False]
        assert memory.seen(0)[0].tolist() == list(range(9))
        assert sorted(memory.seen(0, 1)[0].tolist()) == [6, 7, 8]
        assert memory.cells().n_used == 9
        assert memory.cells(0).pos[:9].tolist() == list(range(9))


def test_layouts_of_v_turn_in_both_halves() -> None:
    for v_trans, unified in product((True, False), repeat=2):
        with make_iswa(32, n_seq_max=2, unified=unified, v_trans=v_trans) as memory:
            scene = MemoryScene(memory)
            assert scene.step([*run(0, range(14)), *run(1, range(5))]) < ROUNDED
            for half in (memory.base, memory.swa):
                half.store_v(not v_trans)
            assert scene.step([(0, 14), (1, 5)]) < ROUNDED
            assert all(half.store.v_trans is not v_trans for half in (memory.base, memory.swa))
