"""What window caches take: cells as the specification has them, bytes told beforehand, no more after a long talk."""

from __future__ import annotations

import pytest
from support.iswa_memory import FULL, LAYERS, make_iswa, positions
from support.kv_scene import run, store_positions

from pykv.cells import SwaType, Window
from pykv.errors import ParamError
from pykv.memory import ISWACache, KVSettings, LayerSpec, MemorySettings, MemorySpec, make_memory, memory_plan

KIB = 2 * 256 * 2
"""Bytes of one cell in one layer of case A20: K and V 256 wide, f16."""
A20 = MemorySpec(
    (LayerSpec(1, 256, 256),) * 2 + (LayerSpec(1, 256, 256, is_swa=True),) * 10, Window(512, SwaType.STANDARD)
)


@pytest.mark.parametrize(
    ("n_cells", "n_swa", "n_seq", "unified", "swa_full", "expected"),
    [
        (4096, 512, 4, False, False, 1024),
        (4096, 512, 4, True, False, 2560),
        (512, 1024, 1, True, False, 512),
        (8192, 1000, 1, True, False, 1536),
        (8192, 1000, 1, True, True, 8192),
        (1024, 512, 1, True, False, 1024),
        (256, 512, 4, False, False, 256),
        (32768, 512, 1, True, False, 1024),
    ],
)
def test_cells_of_a_window(n_cells: int, n_swa: int, n_seq: int, unified: bool, swa_full: bool, expected: int) -> None:
    """The examples of the specification."""
    spec = MemorySpec(LAYERS, window=Window(n_swa, SwaType.STANDARD))
    settings = KVSettings(n_cells, n_seq_max=n_seq, unified=unified)
    base, swa = ISWACache.plan(spec, settings, n_ubatch=512, swa_full=swa_full)
    assert (base.settings.n_cells, swa.settings.n_cells) == (n_cells, expected)
    assert ([one.il for one in base.layers], [one.il for one in swa.layers]) == ([0, 3], [1, 2])


@pytest.mark.parametrize(
    ("share", "n_seq", "unified", "base_cells", "swa_cells"),
    [
        (512, 3, False, 1536, 1536),
        (256, 4, False, 1024, 1024),
        (4096, 4, True, 4096, 2560),
        (1024, 4, False, 4096, 4096),
        (4096, 1, True, 4096, 1024),
    ],
)
def test_memory_estimate_ignored_windows(
    share: int, n_seq: int, unified: bool, base_cells: int, swa_cells: int
) -> None:
    """Case A20: the estimate took windows, sequences and rounding for what they are not."""
    settings = MemorySettings(KVSettings(share, n_seq_max=n_seq, unified=unified), n_ubatch=512)
    plan = memory_plan(A20, settings)
    assert plan.nbytes == KIB * (2 * base_cells + 10 * swa_cells)
    assert plan.nbytes_per_layer == {il: KIB * (base_cells if il < 2 else swa_cells) for il in range(12)}
    if n_seq == 4 and share == 4096:
        assert plan.nbytes == 33 << 20
    if n_seq == 4 and share == 1024:
        assert plan.nbytes == 48 << 20


ROWS = {"f16": 64, "q8_0": 34, "q4_0": 18, "f32": 128}
"""Bytes of 32 elements, as the formats are defined."""


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("q8_0", "f16"), ("q4_0", "q8_0"), ("f32", "f32")])
@pytest.mark.parametrize(("n_swa", "n_ubatch"), [(128, 64), (64, 512), (300, 100)])
def test_what_is_planned_is_allocated(type_k: str, type_v: str, n_swa: int, n_ubatch: int) -> None:
    """48 settings: cells, sequences, streams, and windows wider than the context."""
    layers = (
        LayerSpec(1, 32, 32),
        LayerSpec(2, 32, 32, is_swa=True),
        LayerSpec(0, 32, 32),
        LayerSpec(1, 32, 32, is_swa=True),
    )
    spec = MemorySpec(layers, window=Window(n_swa, SwaType.STANDARD))
    for n_cells, n_seq, unified in [(256, 2, True), (512, 3, False), (1024, 4, True), (768, 1, True)]:
        kv = KVSettings(n_cells, n_seq_max=n_seq, unified=unified, type_k=type_k, type_v=type_v)
        settings = MemorySettings(kv, n_ubatch)
        need = min(n_cells, n_swa * (n_seq if unified else 1) + n_ubatch)
        swa_cells = next(n for n in range(256, 4096, 256) if n >= need)
        n_stream = 1 if unified else n_seq
        expected = n_stream * (n_cells + 3 * swa_cells) * (ROWS[type_k] + ROWS[type_v])
        plan = memory_plan(spec, settings)
        assert plan.nbytes == expected
        with make_memory(spec, settings, n_threads=1) as memory:
            assert isinstance(memory, ISWACache)
            assert memory.nbytes == expected
            assert sum(plan.nbytes_per_layer.values()) == expected


def test_layers_without_a_window_make_none() -> None:
    for spec in (MemorySpec((FULL,) * 2, Window(4, SwaType.STANDARD)), MemorySpec(LAYERS)):
        with pytest.raises(ParamError, match="window"):
            ISWACache.plan(spec, KVSettings(32), n_ubatch=4)


def test_a_long_conversation_stays_in_its_window() -> None:
    """32768 tokens: the window cache takes what it took at the beginning, and the tokens in it are the last ones."""
    with make_iswa(32768, n_swa=256, n_ubatch=256) as memory:
        assert memory.swa.n_cells == 512
        nbytes, used = memory.nbytes, set()
        for first in range(0, 32768, 256):
            store_positions(memory, run(0, range(first, first + 250)), n_ubatch=256)
            for p in range(first + 250, first + 256):
                store_positions(memory, [(0, p)])
            if first:
                used.add(memory.swa.cells().n_used)
        assert len(used) == 1
        assert memory.nbytes == nbytes == (8 + 4) * 4 * 2 * (32768 + 512)
        stored = positions(memory.swa)
        assert stored == list(range(32768 - len(stored), 32768))
        assert memory.pos_max(0) == 32767
        assert memory.resumable(0, 32768)
        memory.check()
