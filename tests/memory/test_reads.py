"""K and V read back: in the order of positions, before and after RoPE, from every type and layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.kv_scene import plan_batch, run, store_positions
from support.moved_keys import STEPS, MovedKeys
from support.row_writer import RowWriter, draw, rotated

from pykv.batch import Batch, BatchLimits, validate
from pykv.cells import SwaType, Window
from pykv.errors import ParamError, SequenceError, UseAfterCloseError
from pykv.ggml import RopeParams
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySpec, row_mover

YARN = {"n_ctx_orig": 256, "freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9}
SPEC = MemorySpec(
    (
        LayerSpec(2, 64, 64, RopeParams(64)),
        LayerSpec(2, 64, 64, RopeParams(32, "neox", **YARN)),
        LayerSpec(2, 64, 64),
    )
)
ROUNDING = {"f32": 2e-7, "f16": 5e-4, "bf16": 4e-3} | STEPS
"""Relative to the largest element."""


def make(spec: MemorySpec = SPEC, n_cells: int = 64, **settings) -> KVCache:
    return KVCache(spec, KVSettings(n_cells, **settings), n_threads=1)


def fill(cache: KVCache, tokens: list, seed: int = 0) -> list:
    raw = draw(cache.spec, len(tokens), np.random.default_rng(seed))
    with RowWriter(cache) as writer:
        assert writer.store(tokens, raw)
    return raw


def test_keys_come_in_the_order_of_positions() -> None:
    """The cells of a sequence lie in any order, between those of another one."""
    with make(type_k="f32", n_seq_max=2) as cache:
        fill(cache, run(0, range(8)), seed=9)
        fill(cache, run(1, range(3)), seed=9)
        cache.seq_rm(0, 4, -1)
        raw = fill(cache, run(1, range(3, 9)), seed=1)
        cache.seq_rm(1, 0, 3)
        cache.seq_add(1, 6, -1, -6)
        order = [3, 4, 5, 0, 1, 2]
        assert cache.dump() == "0:0{0} 1:1{0} 2:2{0} 3:3{0} 4:3{1} 5:4{1} 6:5{1} 7:0{1} 8:. 9:. 10:. 11:1{1} 12:2{1}"
        for il, layer in enumerate(SPEC.layers):
            ours = cache.k(il, 1)
            assert ours.shape == (6, 2, 64)
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, rotated(layer, raw[il][0][order], range(6)), atol=1e-5)
            np.testing.assert_allclose(cache.v(il, 1), raw[il][1][order], atol=5e-4)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("unified", [True, False])
def test_types_and_streams(dtype: str, unified: bool) -> None:
    with make(type_k=dtype, type_v=dtype, n_seq_max=3, unified=unified) as cache:
        tokens = [(s, p) for p in range(7) for s in (2, 0)]
        raw = fill(cache, tokens)
        for s, mine in ((2, slice(0, None, 2)), (0, slice(1, None, 2))):
            for il, layer in enumerate(SPEC.layers):
                k, v = raw[il][0][mine], raw[il][1][mine]
                # a Hadamard rotation spreads the errors over the block and makes the largest element larger
                most = 2.5 * ROUNDING[dtype] + 1e-6
                assert np.abs(cache.k(il, s) - rotated(layer, k, range(7))).max() <= most
                assert np.abs(cache.k(il, s, derotate=True) - k).max() <= most
                assert np.abs(cache.v(il, s) - v).max() <= most
        assert cache.k(0, 1).shape == cache.v(1, 1).shape == (0, 2, 64)


@pytest.mark.parametrize("type_v", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("unified", [True, False])
def test_transposed_values(type_v: str, unified: bool) -> None:
    """Of layers of different width: the narrow one is padded."""
    spec = MemorySpec((LayerSpec(2, 32, 32), LayerSpec(1, 32, 16)))
    with make(spec, v_trans=True, type_v=type_v, n_seq_max=2, unified=unified) as cache:
        raw = fill(cache, [(s, p) for p in range(9) for s in (0, 1)])
        for s in (0, 1):
            for il, layer in enumerate(spec.layers):
                v = cache.v(il, s)
                assert v.shape == (9, layer.n_head_kv, layer.n_embd_head_v)
                np.testing.assert_allclose(v, raw[il][1][s::2], atol=ROUNDING[type_v])
        assert cache.v(0, 0).flags.writeable


def test_values_read_the_same_in_both_layouts() -> None:
    with make(n_seq_max=2, unified=False) as cache:
        fill(cache, [(s, p) for p in range(9) for s in (0, 1)])
        by_row = [cache.v(il, s) for il in range(3) for s in (0, 1)]
        cache.store_v(transposed=True)
        assert all(map(np.array_equal, by_row, [cache.v(il, s) for il in range(3) for s in (0, 1)]))


def test_keys_before_rope_stay_the_same_wherever_they_are_moved() -> None:
    with make(type_k="f32") as cache:
        keys = MovedKeys(cache, 30)
        for p0, delta in ((0, 0), (4, 40), (10, 5), (60, -20)):
            keys.add(p0, -1, delta)
            for il in range(3):
                order = np.argsort(keys.pos, kind="stable")
                np.testing.assert_allclose(cache.k(il, 0, derotate=True), keys.raw[il][0][order], atol=2e-5)


def test_what_is_read_is_a_copy() -> None:
    with make(type_k="f32", type_v="f32") as cache:
        fill(cache, run(0, range(4)))
        before = cache.k(0, 0).copy(), cache.v(0, 0).copy()
        cache.k(0, 0)[:] = 7
        cache.v(0, 0)[:] = 7
        kept = cache.k(0, 0), cache.v(0, 0)
        cache.clear()
        assert all(map(np.array_equal, kept, before))


def test_reading_a_layer_or_a_sequence_that_is_not_there() -> None:
    with make(MemorySpec((LayerSpec(1, 32, 32), LayerSpec(0, 32, 32))), n_seq_max=2) as cache:
        for read in (cache.k, cache.v):
            for il in (1, 2, -1):
                with pytest.raises(ParamError, match=f"il={il}"):
                    read(il, 0)
            for seq_id in (2, -1, "a", None, True):
                with pytest.raises(SequenceError):
                    read(0, seq_id)
            assert read(0, np.int64(1)).shape == (0, 1, 32)
        for seq_id in (2, -1):
            with pytest.raises(SequenceError):
                cache.visible(seq_id, 0)
        for pos in (-1, 2**31, "a"):
            with pytest.raises(ParamError, match="pos"):
                cache.visible(0, pos)
    for read in (lambda: cache.k(0, 0), lambda: cache.v(0, 0), lambda: cache.visible(0, 0), cache.dump, cache.cells):
        with pytest.raises(UseAfterCloseError):
            read()


# nobody sees new positions with old keys


def _decode(cache: KVCache) -> object:
    return plan_batch(cache, run(0, [cache.pos_max(0) + 1]))


def _apply(cache: KVCache) -> None:
    store_positions(cache, run(0, [cache.pos_max(0) + 1]))


READERS: dict[str, Callable[[KVCache], object]] = {
    "k": lambda cache: cache.k(0, 0),
    "k of another layer": lambda cache: cache.k(2, 0),
    "k of another sequence": lambda cache: cache.k(0, 1),
    "v": lambda cache: cache.v(1, 0),
    "tensors": lambda cache: cache.tensors(0),
    "store_v": lambda cache: cache.store_v(True),
    "init_batch": _decode,
    "apply": _apply,
    "update": lambda cache: cache.update(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("unified", [True, False])
def test_new_positions_were_seen_with_old_keys(reader: str, unified: bool) -> None:
    with make(type_k="f32", n_seq_max=2, unified=unified) as cache:
        keys = MovedKeys(cache, 20)
        keys.add(5, -1, 7)
        cache.seq_cp(0, 1, 3, -1)
        keys.add(12, -1, 20)
        READERS[reader](cache)
        assert not cache.streams.has_shift
        assert not cache.streams.pending_copies
        stream = cache.streams.cells[0]
        idxs = stream.find(0, 0, 1000)[:20]
        order = idxs[np.argsort(stream.pos[idxs], kind="stable")]
        for il, layer in enumerate(SPEC.layers):
            stored = cache.store.tensors(il)[0].numpy()[0, 0].reshape(64, 2, 64)[order]
            np.testing.assert_allclose(stored, rotated(layer, keys.raw[il][0], keys.pos), atol=1e-5)


@pytest.mark.parametrize("reader", ["k", "v", "tensors", "init_batch", "update"])
def test_a_sharing_cache_lets_both_follow(reader: str) -> None:
    settings = KVSettings(64, type_k="f32")
    with make(type_k="f32") as base, KVCache(SPEC, settings, other=base, share={0: 0}, n_threads=1) as cache:
        keys = MovedKeys(base, 20)
        own = np.random.default_rng(3).uniform(-1, 1, (64, 2, 64)).astype(np.float32)
        cache.tensors(1)[0].set(own)
        keys.add(5, -1, 7)
        READERS[reader](cache)
        assert not base.streams.has_shift
        keys.check("f32")
        np.testing.assert_allclose(cache.k(0, 0), base.k(0, 0), atol=0)
        moved = rotated(SPEC.layers[1], own[5:20], np.full(15, 7)) / (0.9 * (1 + 0.1 * np.log(4)))
        stored = cache.store.tensors(1)[0].numpy()[0, 0].reshape(64, 2, 64)
        # RoPE by the delta, without its magnitude
        turned = slice(0, 32)
        np.testing.assert_allclose(stored[5:20, :, turned], moved[..., turned], atol=1e-5)
        assert np.array_equal(stored[:5], own[:5])
        assert np.array_equal(stored[5:20, :, 32:], own[5:20, :, 32:])


# inspection of the bookkeeping


def test_visible_names_the_positions_a_query_attends_to() -> None:
    with make(n_seq_max=2) as cache:
        store_positions(cache, run((0, 1), range(3)))
        store_positions(cache, run(0, range(3, 6)))
        cache.seq_rm(0, 4, 5)
        assert {kind: pos.tolist() for kind, pos in cache.visible(0, 5).items()} == {"full": [0, 1, 2, 3, 5]}
        assert cache.visible(0, 3)["full"].tolist() == [0, 1, 2, 3]
        assert cache.visible(1, 100)["full"].tolist() == [0, 1, 2]
        cache.seq_add(0, 5, -1, 4)
        assert cache.visible(0, 9)["full"].tolist() == [0, 1, 2, 3, 9]
        cache.seq_rm(1)
        assert cache.visible(1, 100)["full"].tolist() == []


@pytest.mark.parametrize(
    ("kind", "n", "pos", "expected"),
    [
        (SwaType.STANDARD, 3, 7, [5, 6, 7]),
        (SwaType.CHUNKED, 4, 6, [4, 5, 6]),
        (SwaType.CHUNKED, 4, 8, [8]),
        (SwaType.SYMMETRIC, 4, 7, [5, 6, 7]),
    ],
)
def test_visible_through_a_window(kind: SwaType, n: int, pos: int, expected: list[int]) -> None:
    with make(MemorySpec((LayerSpec(1, 32, 32),), window=Window(n, kind))) as cache:
        store_positions(cache, run(0, range(10)))
        ((name, seen),) = cache.visible(0, pos).items()
        assert name == kind.name.lower()
        assert seen.tolist() == expected


def test_cells_show_owners_positions_and_what_is_pending() -> None:
    with make(n_seq_max=3) as cache:
        store_positions(cache, run((0, 2), range(2)))
        store_positions(cache, run(0, range(2, 5)))
        cache.seq_rm(0, 3, 4)
        cache.seq_add(0, 4, -1, 3)
        view = cache.cells()
        assert (len(view), view.n_used) == (64, 4)
        assert view.pos[:6].tolist() == [0, 1, 2, -1, 7, -1]
        assert view.shift[:6].tolist() == [0, 0, 0, 0, 3, 0]
        assert [view.owners_of(i) for i in range(5)] == [(0, 2), (0, 2), (0,), (), (0,)]
        assert view.owners[:, :5].tolist() == [[True, True, True, False, True], [False] * 5, [True] * 2 + [False] * 3]
        for array in (view.pos, view.shift, view.token, view.owners):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        assert cache.dump() == "0:0{0,2} 1:1{0,2} 2:2{0} 3:. 4:7{0}"


def test_dump_of_streams() -> None:
    with make(n_seq_max=2, unified=False) as cache:
        assert cache.dump(0) == cache.dump(1) == ""
        store_positions(cache, run(1, range(3)))
        cache.seq_rm(1, 0, 1)
        assert cache.dump(1) == "0:. 1:1{1} 2:2{1}"
        assert cache.dump(0) == ""
        for stream in (2, -1, "a"):
            with pytest.raises(ParamError, match="stream"):
                cache.dump(stream)


def test_check_names_what_is_wrong() -> None:
    with make() as cache:
        store_positions(cache, run(0, range(3)))
        cache.check()
        cache.streams.cells[0].n_used = 2
        with pytest.raises(AssertionError, match="n_used is 2, 3 cells"):
            cache.check()


def test_tokens_of_a_batch_are_shown_with_their_cells() -> None:
    with make() as cache:
        batch = Batch([5, 6, 7], pos=[0, 1, 2], seq_id=0)
        cache.init_batch(validate(batch, BatchLimits(8, 10, 1), cache), 8).apply(0)
        assert cache.cells().token[:4].tolist() == [5, 6, 7, -1]


UNSPELT = {
    "huge": 10**5000,
    "tiny": -(10**5000),
    "float": 0.5,
    "text": "x" * 500,
    "none": None,
    "array": np.array([0, 1]),
    "bool": True,
}


@pytest.mark.parametrize("bad", UNSPELT.values(), ids=UNSPELT)
def test_arguments_that_cannot_be_spelt_ended_in_other_errors(bad: object) -> None:
    with KVCache(MemorySpec((LayerSpec(1, 64, 64),)), KVSettings(8, n_seq_max=2)) as cache:
        for call in (
            lambda: cache.seq_rm(bad),
            lambda: cache.seq_add(0, 0, -1, bad),
            lambda: cache.pos_max(bad),
            lambda: cache.pos_min(bad),
            lambda: cache.k(bad, 0),
            lambda: cache.v(bad, 0),
            lambda: cache.visible(0, bad),
            lambda: cache.cells(bad),
            lambda: cache.dump(bad),
            lambda: cache.tensors(bad),
        ):
            with pytest.raises((ParamError, SequenceError)) as caught:
                call()
            assert len(str(caught.value)) < 300


@pytest.mark.parametrize("bad", ["no", 1, None, np.array([True, False])])
def test_flags_that_are_none_counted_as_true(bad: object) -> None:
    with KVCache(MemorySpec((LayerSpec(1, 64, 64),)), KVSettings(8)) as cache:
        store_positions(cache, run(0, range(3)))
        with pytest.raises(ParamError, match="derotate"):
            cache.k(0, 0, derotate=bad)
        with pytest.raises(ParamError, match="data"):
            cache.clear(bad)
        assert cache.pos_max(0) == 2
        cache.clear(np.False_)
        assert cache.pos_max(0) == -1


@pytest.mark.parametrize("type_k", ["f16", "q8_0", "q4_0"])
def test_moves_that_round_keys_anew_are_told(type_k: str) -> None:
    with KVCache(MemorySpec((LayerSpec(1, 64, 64),)), KVSettings(8, type_k=type_k)) as cache:
        assert cache.can_shift()
        assert cache.can_shift().is_lossy == type_k.startswith("q")


def test_a_closed_cache_checked_and_turned_nothing_without_a_word() -> None:
    cache = KVCache(MemorySpec((LayerSpec(1, 64, 64),)), KVSettings(8))
    cache.close()
    for call in (cache.check, cache.dump, lambda: cache.store_v(False), lambda: cache.visible(0, 0), cache.update):
        with pytest.raises(UseAfterCloseError):
            call()


def test_a_long_sequence_was_read_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_mover, "CHUNK_BYTES", 8 * 4 * 64)
    layer = LayerSpec(1, 64, 64, RopeParams(64))
    with KVCache(MemorySpec((layer,)), KVSettings(64, type_k="f32", type_v="f32"), n_threads=1) as cache:
        keys = MovedKeys(cache, 29)
        raw_k, raw_v = keys.raw[0]
        np.testing.assert_allclose(cache.k(0, 0, derotate=True), raw_k, atol=1e-5)
        np.testing.assert_array_equal(cache.v(0, 0), raw_v)
