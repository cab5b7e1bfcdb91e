"""Decoding goes on with what was loaded as it would have with what was saved."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
from support.iswa_memory import NEAR, make_iswa
from support.kv_scene import run
from support.memory_scene import MemoryScene
from support.state_io import load, saved
from support.state_scene import StateScene, hybrid_spec, state_spec
from support.twin_scene import TURNED, TwinScene, make_twin

from pykv.cells import SwaType, Window
from pykv.ggml import RopeParams
from pykv.memory import (
    HybridMemory,
    KVCache,
    KVSettings,
    LayerSpec,
    Memory,
    MemorySettings,
    MemorySpec,
    RecurrentMemory,
    iswa,
    make_memory,
)

SPEC = MemorySpec.uniform(2, LayerSpec(1, 8, 4, RopeParams(8)))
EXACT = {"type_k": "f32", "type_v": "f32"}


@pytest.fixture(autouse=True)
def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iswa, "PAD", 1)


def make_cache(n_cells: int, unified: bool) -> Memory:
    return KVCache(SPEC, n_cells=n_cells, n_seq_max=3, unified=unified, v_trans=True, n_threads=1, **EXACT)


def make_windows(n_cells: int, unified: bool) -> Memory:
    return make_iswa(n_cells, n_seq_max=3, unified=unified)


def lived(make: Callable[[int, bool], Memory], unified: bool) -> MemoryScene:
    """Return a scene with two conversations that alternate, one of them moved, and a fork."""
    scene = MemoryScene(make(32, unified))
    for p in range(0, 9, 3):
        scene.step(run(0, range(p, p + 3)))
        scene.step(run(1, range(p, p + 2)) if p == 0 else run(1, [p // 3 + 1]))
    scene.edit("seq_add", 1, 0, -1, 4)
    scene.edit("seq_cp", 0, 2, -1, -1)
    return scene


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("make", [make_cache, make_windows])
def test_all_go_on_in_a_larger_memory(make: Callable[[int, bool], Memory], unified: bool) -> None:
    scene = lived(make, unified)
    with scene.memory as old, make(48, unified) as new:
        load(new, saved(old))
        scene.memory = new
        assert scene.step([*run(0, [9]), *run(1, [8]), *run(2, [9])]) <= TURNED
        assert scene.step(run(2, range(10, 14))) <= TURNED


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("make", [make_cache, make_windows])
def test_one_goes_on_among_others(make: Callable[[int, bool], Memory], unified: bool) -> None:
    """In cells that another sequence leaves, and then in a memory that others are in already."""
    scene = lived(make, unified)
    with scene.memory as old:
        blob = saved(old, 0)
        old.seq_rm(0)
        scene.step(run(1, [8, 9]))
        load(old, blob, 0)
        old.check()
        assert scene.step([*run(0, [9]), *run(1, [10]), *run(2, [9])]) <= TURNED


def test_a_twin_goes_on_with_both_of_its_caches() -> None:
    with make_twin(24, n_seq_max=3) as twin, make_twin(40, n_seq_max=3) as other:
        scene = TwinScene(twin)
        for p in range(4):
            scene.step([(0, p), (1, p)])
        for seq_id in (0, 1):
            load(other, saved(twin, seq_id), seq_id)
        after = TwinScene(other)
        after.naive, after.raw = deepcopy(scene.naive), scene.raw
        assert after.step([(0, 4), (1, 4)]) <= NEAR
        after.check_rows()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", ["states", "hybrid", "hybrid with windows"])
def test_a_state_that_was_taken_back_goes_on_from_there(kind: str, whole: bool) -> None:
    """Also in a memory that was taken back itself; what is loaded can go back no further."""

    def make() -> RecurrentMemory | HybridMemory:
        if kind == "states":
            return RecurrentMemory(state_spec(), 2, 8)
        window = Window(8, SwaType.STANDARD) if "windows" in kind else Window()
        spec = hybrid_spec(window) if "windows" in kind else hybrid_spec()
        settings = MemorySettings(KVSettings(64, n_seq_max=2, **EXACT), n_ubatch=16, n_rs_seq=8)
        memory = make_memory(spec, settings, n_threads=1)
        assert isinstance(memory, HybridMemory)
        return memory

    with make() as one, make() as two:
        source, target = StateScene(one), StateScene(two)
        source.decode([(0, t) for t in range(1, 10)])
        assert one.seq_rm(0, 6)
        target.decode([(0, 5)] * 7)
        assert two.seq_rm(0, 4)
        load(two, saved(one, -1 if whole else 0), -1 if whole else 0)
        assert not two.seq_rm(0, 5)
        target.tokens = {0: list(range(1, 7))}
        target.check()
        target.decode([(0, t) for t in (7, 8, 9)])
        target.decode([(1, t) for t in range(3, 20)], n_ubatch=16)
        target.check()
        assert two.seq_rm(0, 8)
