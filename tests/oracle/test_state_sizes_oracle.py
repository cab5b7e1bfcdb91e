"""Recurrent states take as many bytes as in real llama.cpp, planned and allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.oracle import Oracle
from support.paired import Pair
from support.tiny.model import TinyFile
from support.tiny.registry import BY_ARCH

import pykv
from pykv.memory import HybridMemory, RecurrentMemory

pytestmark = pytest.mark.oracle

FAMILIES = ("mamba", "mamba2", "rwkv7", "lfm2", "falcon-h1", "jamba", "qwen3next")
MODELS = {name: model for arch in FAMILIES for name, model in BY_ARCH[arch].items() if model.matrices == "f32"}

N_RS_SEQ = {"lfm2": 4}
"""Families that llama.cpp keeps snapshots of; it silently keeps none of others."""


def parts_of(memory: object) -> tuple[RecurrentMemory, int]:
    """Return the states, and the bytes of all other buffers."""
    if isinstance(memory, RecurrentMemory):
        return memory, 0
    assert isinstance(memory, HybridMemory)
    return memory.recurrent, memory.attention.nbytes


@pytest.mark.parametrize("n_seq_max", [1, 3])
@pytest.mark.parametrize("name", list(MODELS))
def test_states_take_what_they_take_in_llama_cpp(
    oracle: Oracle, write_tiny: Callable[[TinyFile], Path], name: str, n_seq_max: int
) -> None:
    path = write_tiny(MODELS[name])
    with pykv.Model.load(path) as model:
        for n_rs_seq in {0, N_RS_SEQ.get(MODELS[name].arch, 0)}:
            sizes = {"n_ctx": 768, "n_seq_max": n_seq_max, "n_rs_seq": n_rs_seq, "n_ubatch": 64, "n_threads": 1}
            with Pair(oracle, model, path, flash_attn=True, swa_full=False, **sizes) as pair:
                states, others = parts_of(pair.ours.memory)
                theirs = pair.theirs.state_nbytes()
                assert model.memory_plan(swa_full=False, **sizes).parts["states"].nbytes == theirs["total"]
                assert states.nbytes == states.plan.nbytes == theirs["total"]
                assert sum(states.plan.nbytes_per_layer.values()) == theirs["r"] + theirs["s"]
                if others:
                    assert others == sum(cache["total"] for cache in pair.theirs.kv_nbytes())
