"""Window memories of four layers, two of them with a window, and what both of their caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.cell_state import state
from support.kv_scene import Token, store_positions
from support.not_on import bound

from pykv.cells import SwaType, Window
from pykv.ggml import RopeParams
from pykv.memory import ISWACache, KVCache, KVSettings, LayerSpec, MemorySpec

NEAR = bound(1e-5, 2e-3)
"""How far outputs may be off; with products rounded to f16 at most 6.2e-4 was measured."""

FULL, SWA = LayerSpec(1, 8, 4, RopeParams(8)), LayerSpec(1, 8, 4, RopeParams(4, "neox", freq_base=500.0), is_swa=True)
LAYERS = (FULL, SWA, SWA, FULL)


def make_iswa(
    n_cells: int = 32, n_swa: int = 4, n_ubatch: int = 4, *, swa_full: bool = False, **settings: Any
) -> ISWACache:
    """Return a memory in f32, whose V is transposed so that attention rounds nothing."""
    kinds = {"type_k": "f32", "type_v": "f32", "v_trans": True} | settings
    spec = MemorySpec(LAYERS, window=Window(n_swa, SwaType.STANDARD))
    return ISWACache(spec, KVSettings(n_cells, **kinds), n_ubatch=n_ubatch, swa_full=swa_full, n_threads=1)


def store(memory: ISWACache, tokens: Sequence[Token], n_ubatch: int = 4) -> None:
    """Write only the bookkeeping of some tokens."""
    store_positions(memory, tokens, n_ubatch)


def both(memory: ISWACache) -> list[dict[str, Any]]:
    """Return all figures of both caches."""
    return [state(memory.base.streams), state(memory.swa.streams)]


def positions(half: KVCache, seq_id: int = 0) -> list[int]:
    """Return the positions that a cache holds, ascending."""
    cells = half.streams.cells[half.streams.stream_of(seq_id)]
    return sorted(cells.pos[cells.member(seq_id)].tolist())


def words(half: KVCache) -> str:
    """Return the cells in use."""
    return " ".join(word for word in half.dump().split() if not word.endswith("."))
