"""Tiny f32 models, every RoPE and family option, in pykv and in real llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nmse import nmse
from support.oracle import Oracle, OracleBatch
from support.paired import Pair, pykv_batch
from support.tiny_gguf import TINY_MODELS, TinyModel

import pykv
from pykv.errors import BatchError, NoSlotError

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-6
"""Weights are f32, so only the f16 cache and the order of sums are left to differ."""

TOKENS = [int(t) for t in np.random.default_rng(21).integers(0, 300, 400)]


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "plain"])
@pytest.mark.parametrize("name", list(TINY_MODELS))
def test_tiny_model_gives_llama_cpps_rows(oracle: Oracle, tiny_paths: dict[str, Path], name: str, flash: bool) -> None:
    path = tiny_paths[name]
    with (
        pykv.Model.load(str(path)) as model,
        Pair(oracle, model, path, n_ctx=512, n_ubatch=64, flash_attn=flash, n_threads=1) as pair,
    ):
        rows, expected = pair.decode(OracleBatch.of(TOKENS[:150], logits="all"))
        assert nmse(rows, expected) <= TOLERANCE
        for i in range(150, 160):
            rows, expected = pair.decode(OracleBatch.of(TOKENS[i : i + 1], i))
            assert nmse(rows, expected) <= TOLERANCE


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_random_forks_trims_and_batches_stay_together(oracle: Oracle, tiny_llama_path: Path, unified: bool) -> None:
    """Walk both sides through the same random history; positions and rows agree after every step."""
    rng, n_seqs = np.random.default_rng(5), 3
    cache: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1}
    with (
        pykv.Model.load(str(tiny_llama_path)) as model,
        Pair(
            oracle,
            model,
            tiny_llama_path,
            n_ctx=768,
            n_seq_max=n_seqs,
            kv_unified=unified,
            n_ubatch=32,
            **cache,
        ) as pair,
    ):
        for _ in range(60):
            verb = str(rng.choice(["decode", "decode", "rm", "cp", "keep"], p=[0.35, 0.35, 0.15, 0.1, 0.05]))
            a, b = (int(s) for s in rng.permutation(n_seqs)[:2])
            end = pair.theirs.memory("seq_pos_max", a)
            if verb == "decode" and end < 200:
                tokens = [int(t) for t in rng.integers(0, 300, rng.integers(1, 40))]
                rows, expected = pair.decode(OracleBatch.of(tokens, end + 1, a, "all"))
                assert nmse(rows, expected) <= TOLERANCE
            elif verb == "rm" and end > 0:
                pair.edit("seq_rm", a, int(rng.integers(0, end + 1)), -1)
            elif verb == "cp" and unified:
                pair.edit("seq_rm", b, -1, -1)
                pair.edit("seq_cp", a, b, -1, -1)
            elif verb == "keep" and unified:
                pair.edit("seq_keep", a)
            pair.check_positions(n_seqs)


def test_what_llama_cpp_refuses_pykv_refuses_with_a_reason(oracle: Oracle, tiny_llama_path: Path) -> None:
    def both(batch: OracleBatch, code: int, error: type[Exception]) -> None:
        assert pair.theirs.decode_code(batch) == code
        with pytest.raises(error):
            pair.ours.decode(pykv_batch(batch))
        pair.check_positions(2)

    with (
        pykv.Model.load(str(tiny_llama_path)) as model,
        Pair(oracle, model, tiny_llama_path, n_ctx=256, n_seq_max=2, n_threads=1) as pair,
    ):
        pair.decode(OracleBatch.of(TOKENS[:100]))
        both(OracleBatch.of(TOKENS[:1], start=99), -1, BatchError)
        both(OracleBatch.of(TOKENS[:1], start=101), -1, BatchError)
        both(OracleBatch([1, 2], [100, 102], [(0,), (0,)], [False, True]), -1, BatchError)
        both(OracleBatch([1, 2], [101, 100], [(0,), (0,)], [False, True]), -1, BatchError)
        both(OracleBatch.of([320]), -1, BatchError)
        both(OracleBatch.of(TOKENS[:1], start=100, seq_id=(0, 1)), -1, BatchError)
        both(OracleBatch.of(TOKENS[:157], start=100), 1, NoSlotError)
        pair.decode(OracleBatch.of(TOKENS[:156], start=100))


SMALL, WIDE = TINY_MODELS["llama"], TINY_MODELS["llama-wide-heads"]
ONE_HEAD = TinyModel(n_head=3, n_head_kv=1, head_dim=96, n_embd=64, n_layer=3, seed=30)

KV_SETTINGS: list[tuple[TinyModel, dict[str, Any]]] = [
    (SMALL, {"n_ctx": 256}),
    (SMALL, {"n_ctx": 1000}),
    (SMALL, {"n_ctx": 0}),
    (SMALL, {"n_ctx": 4096, "n_seq_max": 4}),
    (SMALL, {"n_ctx": 4096, "n_seq_max": 4, "kv_unified": False}),
    (SMALL, {"n_ctx": 512, "n_seq_max": 3, "kv_unified": False}),
    (SMALL, {"n_ctx": 1000, "n_seq_max": 2, "kv_unified": False, "n_batch": 64}),
    (SMALL, {"n_ctx": 512, "type_k": "q8_0"}),
    (SMALL, {"n_ctx": 512, "type_k": "q4_0", "flash_attn": True}),
    (SMALL, {"n_ctx": 512, "type_k": "q4_0", "flash_attn": False}),
    (SMALL, {"n_ctx": 512, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": True}),
    (SMALL, {"n_ctx": 512, "type_k": "q5_1", "type_v": "q4_1", "flash_attn": True}),
    (SMALL, {"n_ctx": 512, "type_k": "f32", "type_v": "f32", "flash_attn": False}),
    (SMALL, {"n_ctx": 512, "type_k": "bf16", "type_v": "f16"}),
    (WIDE, {"n_ctx": 768, "flash_attn": False}),
    (WIDE, {"n_ctx": 768, "type_k": "q5_0", "n_seq_max": 3, "kv_unified": False}),
    (WIDE, {"n_ctx": 768, "type_v": "iq4_nl", "flash_attn": True}),
    (ONE_HEAD, {"n_ctx": 300, "flash_attn": True}),
    (ONE_HEAD, {"n_ctx": 300, "type_k": "q8_0", "flash_attn": False}),
    (ONE_HEAD, {"n_ctx": 2048, "n_seq_max": 8, "kv_unified": False, "type_k": "q4_1", "type_v": "q5_0"}),
]


@pytest.mark.parametrize(("shape", "params"), KV_SETTINGS)
def test_kv_buffers_take_llama_cpps_bytes(
    oracle: Oracle, write_tiny: Callable[[TinyModel], Path], shape: TinyModel, params: dict[str, Any]
) -> None:
    path = write_tiny(shape)
    with pykv.Model.load(str(path)) as model, Pair(oracle, model, path, **params) as pair:
        theirs = sum(cache["total"] for cache in pair.theirs.kv_nbytes())
        assert model.memory_plan(**params).nbytes == pair.ours.memory.nbytes == theirs
        assert pair.ours.n_ctx_seq == pair.theirs.n_ctx_seq


def test_kv_buffers_of_a_real_model_take_llama_cpps_bytes(oracle: Oracle, smollm2_path: Path) -> None:
    with pykv.Model.load(str(smollm2_path)) as model:
        for params in ({"n_ctx": 8192}, {"n_ctx": 0, "type_k": "q8_0"}):
            with Pair(oracle, model, smollm2_path, **params) as pair:
                theirs = sum(cache["total"] for cache in pair.theirs.kv_nbytes())
                assert model.memory_plan(**params).nbytes == pair.ours.memory.nbytes == theirs
