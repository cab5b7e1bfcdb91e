"""What saving and loading need beside the cache itself: a state may be as large as the memory that is left."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.tiny_gguf import TinyModel

import pykv
from pykv.cells.loaded_cells import LoadedCells, put_sequence

TINY = TinyModel(seed=21, n_embd=64, n_head=2, n_head_kv=1, n_ff=64)
N_CELLS = 2**17
MOST = 24 * 2**20
"""About 100 bytes for each cell's bookkeeping, and pieces of a few MiB; the rows have 64 MiB."""


def peak(do: Callable[[], Any]) -> int:
    """Return the bytes that Python and numpy have at once while something is done, beyond those before."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_scattered", [False, True])
def test_a_state_is_never_in_memory_a_second_time(write_tiny, tmp_path, is_scattered):
    sequence, session = tmp_path / "sequence", tmp_path / "session"
    params: dict[str, Any] = {"n_ctx": N_CELLS, "n_ubatch": 16, "n_threads": 1, "type_k": "f32", "type_v": "f32"}
    with pykv.Model.load(write_tiny(TINY)) as model, model.context(**params) as ctx:
        fill(ctx, is_scattered)
        assert peak(lambda: ctx.save_sequence(sequence, 0)) < MOST
        assert peak(lambda: ctx.save_session(session)) < MOST
        assert sequence.stat().st_size > 64 * 2**20 / (1 + is_scattered)
        assert peak(lambda: ctx.load_sequence(sequence, 0)) < MOST
        assert peak(lambda: ctx.load_session(session)) < MOST


def fill(ctx: pykv.Context, is_scattered: bool) -> None:
    """Book all cells for one sequence; if scattered, leave it every second one."""
    pos = np.arange(N_CELLS, dtype=np.int32)
    ones = np.ones(N_CELLS, np.int32)
    put_sequence(ctx.memory.streams, 0, LoadedCells(pos, None, ones, ones * 0))
    if is_scattered:
        for cells in ctx.memory.streams.cells:
            cells.rm(np.arange(0, N_CELLS, 2))
