"""What `plan()` says, what is allocated, and what real llama.cpp takes: one number, for every kind of attention memory.

Each part is asked, the base and the window of a memory that has both, and how many cells it has. Recurrent states have
their own file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.oracle import Oracle
from support.paired import Pair
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME

import pykv
from pykv.memory import HybridMemory, ISWACache, KVCache

pytestmark = pytest.mark.oracle

KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "gemma2-4l-w32": ((ISWACache,), "q8_0"),
    "gemma2-3l-wide-w16": ((ISWACache,), "q8_0"),
    "gemma3-7l-w32": ((ISWACache,), "q8_0"),
    "gemma3-6l-wide-w64-list": ((ISWACache,), "q8_0"),
    "gemma3-2l-no-window": ((KVCache,), "q8_0"),
    "gemma3n-22l-w32": ((ISWACache,), "q8_0"),
    "gemma3n-25l-wide-w16": ((ISWACache,), "q8_0"),
    "gpt-oss-4l-w32": ((ISWACache,), "q8_0"),
    "llama4-4l": ((ISWACache,), "f32"),
    "llama4-5l-wide-every2": ((ISWACache,), "f32"),
    "deepseek2-3l": ((KVCache,), "f32"),
    "deepseek2-4l-qrank": ((KVCache,), "f32"),
    "deepseek2-27l-lite": ((KVCache,), "f32"),
    "deepseek2-3l-unabsorbed": ((KVCache,), "f32"),
    "mpt-3l-4heads": ((KVCache,), "f32"),
    "bloom-3l-4heads": ((KVCache,), "f32"),
    "qwen2vl-3l": ((KVCache,), "q8_0"),
    "lfm2-4l-w16": ((HybridMemory, ISWACache), "f32"),
}
"""Tiny model → its kind of memory, a hybrid with its attention; and a type beside f16 that its heads can have."""

SETTINGS: dict[str, dict[str, Any]] = {
    "one sequence": {"n_ctx": 1024},
    "odd context": {"n_ctx": 300, "n_ubatch": 32},
    "streams": {"n_ctx": 2048, "n_seq_max": 3, "kv_unified": False},
    "another type": {"n_ctx": 2048, "n_seq_max": 3, "kv_unified": True},
    "small ubatch": {"n_ctx": 1024, "n_ubatch": 64},
    "no window saved": {"n_ctx": 1024, "swa_full": True},
    "V transposed": {"n_ctx": 1024, "n_seq_max": 2, "kv_unified": False, "flash_attn": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", KINDS)
def test_planned_is_allocated_is_llama_cpps(
    oracle: Oracle, write_tiny: Callable[[TinyFile], Path], name: str, setting: str
) -> None:
    classes, other_type = KINDS[name]
    params = {"flash_attn": True, "swa_full": False, "n_threads": 1, "n_ubatch": 512} | SETTINGS[setting]
    if setting == "another type":
        params |= {"type_k": other_type, "type_v": other_type}
    path = write_tiny(BY_NAME[name])
    with pykv.Model.load(path) as model, Pair(oracle, model, path, **params) as pair:
        plan, memory, theirs = model.memory_plan(**params), pair.ours.memory, pair.theirs.kv_nbytes()
        assert classes == ((HybridMemory, type(memory.attention)) if "states" in plan.parts else (type(memory),))
        states = pair.theirs.state_nbytes()["total"] if "states" in plan.parts else 0
        assert plan.nbytes == memory.nbytes == states + sum(cache["total"] for cache in theirs)
        parts = [part for part_name, part in plan.parts.items() if part_name != "states"]
        assert [part.nbytes for part in parts] == [cache["total"] for cache in theirs]
        assert [part.settings.n_cells for part in parts] == [cache["n_cells"] for cache in theirs]
        assert [sum(part.nbytes_per_layer.values()) for part in parts] == [c["k"] + c["v"] for c in theirs]
