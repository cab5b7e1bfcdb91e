"""A device that fails in the middle of an update: what was turned is not turned again, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.kv_scene import plan_batch, run, store_positions
from support.moved_keys import MovedKeys
from support.row_writer import RowWriter, draw, rotated

from pykv.errors import AllocError, ComputeCancelled, ComputeError
from pykv.ggml import Graph, RopeParams, Sched
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySpec, row_mover

SPEC = MemorySpec((LayerSpec(1, 64, 64, RopeParams(64)), LayerSpec(1, 64, 64, RopeParams(64, "neox", freq_base=500.0))))
CHUNK = 8


class Failing:
    """Lets `Sched.compute` or `Sched.allocate` fail at its n-th call, before or after the work is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, at: int, late: bool) -> None:
        self.n_calls, self.error, self.at, self.late = 0, error, at, late
        self.real: Callable[..., None] = getattr(Sched, method)

        def fail(sched: Sched, graph: Graph) -> None:
            self.call(sched, graph)

        monkeypatch.setattr(Sched, method, fail)

    def call(self, sched: Sched, graph: Graph) -> None:
        self.n_calls += 1
        if self.late or self.n_calls != self.at:
            self.real(sched, graph)
        if self.n_calls == self.at:
            raise self.error


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_mover, "CHUNK_BYTES", CHUNK * 4 * 64)


def make(**settings) -> KVCache:
    return KVCache(SPEC, KVSettings(**{"n_cells": 64, "type_k": "f32"} | settings), n_threads=1)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_rows_that_were_turned_are_not_turned_again(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    with make() as cache:
        keys = MovedKeys(cache, 40)
        keys.add(0, -1, 9)
        Failing(monkeypatch, "compute", ComputeError("no"), at, late=False)
        with pytest.raises(ComputeError):
            cache.update()
        assert np.count_nonzero(cache.cells().shift) == 40 - CHUNK * (at - 1)
        keys.check("f32")


def test_an_update_could_not_be_stopped() -> None:
    with make(n_seq_max=2, n_cells=128) as cache:
        keys = MovedKeys(cache, 40)
        keys.add(0, -1, 9)
        cache.seq_cp(0, 1)
        keys.add(20, -1, 4)
        cache.guard.flag.set()
        for _ in range(2):
            with pytest.raises(ComputeCancelled, match="the next update goes on"):
                cache.update()
            assert cache.streams.pending_copies
            assert np.count_nonzero(cache.cells().shift) > 0
        cache.guard.flag.clear()
        keys.check("f32")


def test_verbs_between_the_failure_and_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(n_seq_max=2, n_cells=128) as cache:
        keys = MovedKeys(cache, 40)
        keys.add(0, -1, 9)
        Failing(monkeypatch, "compute", ComputeError("no"), 3, late=False)
        with pytest.raises(ComputeError):
            cache.update()
        keys.add(20, -1, 4)
        cache.seq_cp(0, 1, 12, 35)  # a fork of rows that were turned and of rows that were not
        keys.add(17, -1, 5)
        keys.add(0, 15, -3)
        keys.check("f32")
        raw = [k for k, _ in keys.raw]
        for il, layer in enumerate(SPEC.layers):
            fresh = rotated(layer, raw[il][3:22], [*range(12, 20), *range(24, 35)])
            np.testing.assert_allclose(cache.k(il, 1), fresh, atol=1e-5)


def test_every_reader_fails_until_the_keys_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as cache, monkeypatch.context() as patch:
        keys = MovedKeys(cache, 20)
        keys.add(0, -1, 9)

        def broken(*_: object) -> None:
            raise ComputeError("broken")

        patch.setattr(Sched, "compute", broken)
        for read in (
            lambda: cache.k(0, 0), lambda: cache.v(0, 0), lambda: cache.tensors(0), cache.update,
            lambda: cache.store_v(True), lambda: plan_batch(cache, run(0, [29])),
        ):  # fmt: skip
            with pytest.raises(ComputeError, match="broken"):
                read()
        assert cache.cells().n_used == 20
        assert not cache.store.v_trans
        patch.undo()
        monkeypatch.setattr(row_mover, "CHUNK_BYTES", CHUNK * 4 * 64)
        keys.check("f32")


@pytest.mark.parametrize("late", [True, False])
def test_memory_that_could_not_be_had_once_was_refused_for_ever(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """The graph counted as allocated, and was kept for the next try."""
    with make() as cache:
        keys = MovedKeys(cache, 20)
        keys.add(0, -1, 9)
        failing = Failing(monkeypatch, "allocate", AllocError("no"), 1, late)
        with pytest.raises(AllocError):
            cache.update()
        keys.check("f32")
        assert failing.n_calls > 1


@pytest.mark.parametrize("at", range(1, 7))
def test_one_of_two_stores_on_the_same_cells_fails(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Neither is a move ahead of the other."""
    settings = KVSettings(64, type_k="f32")
    raws = [draw(SPEC, 24, np.random.default_rng(i)) for i in (0, 1)]
    with make() as base, KVCache(SPEC, settings, other=base, n_threads=1) as cache:
        with RowWriter(base) as writer, RowWriter(cache) as second:
            plan = plan_batch(base, run(0, range(24)))
            shape = plan.apply(0)
            for one, raw in ((writer, raws[0]), (second, raws[1])):
                one.write(shape, plan.slots[0], plan.ubatches[0], raw)
        base.seq_add(0, 0, -1, 9)
        failing = Failing(monkeypatch, "compute", ComputeError("no"), at, late=False)
        with pytest.raises(ComputeError):
            cache.update()
        assert failing.n_calls >= at
        base.seq_add(0, 5, -1, -2)
        for one, raw in ((base, raws[0]), (cache, raws[1])):
            for il, layer in enumerate(SPEC.layers):
                fresh = rotated(layer, raw[il][0], np.arange(24) + 7)
                np.testing.assert_allclose(one.k(il, 0), fresh, atol=1e-5)


def test_copies_that_were_not_carried_out_stay_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(n_seq_max=2, unified=False) as cache:
        keys = MovedKeys(cache, 20)
        keys.add(3, -1, 9)
        cache.seq_cp(0, 1)
        real, calls = row_mover.copy_rows, []

        def fail_once(*args: object) -> None:
            calls.append(args)
            if len(calls) == 3:  # of K and V of two layers
                raise MemoryError
            real(*args)

        monkeypatch.setattr(row_mover, "copy_rows", fail_once)
        with pytest.raises(MemoryError):
            cache.update()
        assert cache.streams.pending_copies
        keys.check("f32")
        for il in (0, 1):
            assert np.array_equal(cache.k(il, 1), cache.k(il, 0))
            assert np.array_equal(cache.v(il, 1), cache.v(il, 0))


def test_a_decode_after_a_failed_update_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as cache:
        keys = MovedKeys(cache, 20)
        keys.add(0, -1, 9)
        Failing(monkeypatch, "compute", ComputeError("no"), 2, late=False)
        with pytest.raises(ComputeError):
            plan_batch(cache, run(0, [29]))
        store_positions(cache, run(0, [29]))
        cache.seq_rm(0, 29, -1)
        keys.check("f32")
