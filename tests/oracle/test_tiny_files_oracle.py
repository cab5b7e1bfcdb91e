"""Every tiny file loads in real llama.cpp, and what it computes shows the mechanisms that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nmse import nmse
from support.oracle import F32Array, Oracle, OracleBatch
from support.tiny import gemma2, gemma3, gpt_oss, lfm2, llama4
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME

pytestmark = pytest.mark.oracle

Write = Callable[[TinyFile], Path]

EXACT = {"type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1, "n_ubatch": 64}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 256, 100)]


def rows_of(oracle: Oracle, path: Path, *prompts: list[int], **params: Any) -> list[F32Array]:
    """Return the logits of every token, (n, n_vocab), of prompts that do not know each other."""
    found = []
    with oracle.context(path, **({"n_ctx": 256} | EXACT | params)) as ctx:
        for tokens in prompts:
            ctx.memory("clear", 1)
            found += ctx.decode(OracleBatch.of(tokens, logits="all"))
    return found


def with_another(tokens: list[int], index: int) -> list[int]:
    """Return the prompt with one token that is another."""
    changed = list(tokens)
    changed[index] = (changed[index] + 7) % 256
    return changed


@pytest.mark.parametrize("name", list(BY_NAME))
def test_logits_are_finite_and_every_token_counts(oracle: Oracle, write_tiny: Write, name: str) -> None:
    prompts = TOKENS, with_another(TOKENS, 98), with_another(TOKENS, 70), with_another(TOKENS, 99)
    base, *others = rows_of(oracle, write_tiny(BY_NAME[name]), *prompts)
    assert np.isfinite(base).all()
    assert base.std(axis=1).min() > 0.1
    assert len({int(row.argmax()) for row in base}) > 10
    for index, other in zip((98, 70, 99), others, strict=True):
        assert np.array_equal(other[:index], base[:index]), "a token changed rows before it"
        assert nmse(other[index:], base[index:]) > 1e-4
        assert nmse(other[index], base[index]) > 1e-3


@pytest.mark.parametrize("name", list(BY_NAME))
def test_rounding_stays_small(oracle: Oracle, write_tiny: Write, name: str) -> None:
    """No expert is chosen otherwise, and nothing is amplified: f16 caches and other splits give the same logits."""
    path = write_tiny(BY_NAME[name])
    (base,) = rows_of(oracle, path, TOKENS)
    (split,) = rows_of(oracle, path, TOKENS, n_ubatch=17)
    (rounded,) = rows_of(oracle, path, TOKENS, type_k="f16", type_v="f16", flash_attn=True)
    assert nmse(split, base) < (1e-8 if BY_NAME[name].matrices == "f32" else 1e-5)
    assert nmse(rounded, base) < 2e-5


WINDOWED: dict[str, tuple[TinyFile, int]] = {
    "gemma2": (gemma2.Gemma2(n_layer=1, n_swa=16), 15),
    "gemma3": (gemma3.Gemma3(n_layer=2, n_swa=16), 2 * 15),
    "gpt-oss": (gpt_oss.GptOss(n_layer=1, n_swa=32), 31),
    "lfm2": (lfm2.Lfm2(attention_layers=(1, 3), n_swa=16), 2 * 15 + 2 * 2),
}
"""Models whose every layer has a window, and how many tokens back the last one can see through all of them."""


@pytest.mark.parametrize("name", list(WINDOWED))
def test_a_window_ends_where_it_should(oracle: Oracle, write_tiny: Write, name: str) -> None:
    model, reach = WINDOWED[name]
    seen, unseen = with_another(TOKENS, 99 - reach), with_another(TOKENS, 99 - reach - 1)
    base, inside, outside = rows_of(oracle, write_tiny(model), TOKENS, seen, unseen)
    assert np.array_equal(outside[99], base[99])
    assert not np.array_equal(inside[99], base[99])


def test_a_chunk_of_llama4_sees_nothing_before_it(oracle: Oracle, write_tiny: Write) -> None:
    path = write_tiny(llama4.Llama4(pattern=100))
    prompt = [int(t) for t in np.random.default_rng(4).integers(0, 256, 8192 + 40)]
    before, after = with_another(prompt, 8191), with_another(prompt, 8192)
    batches = [
        OracleBatch.of(tokens, logits=[i >= 8180 for i in range(len(tokens))]) for tokens in (prompt, before, after)
    ]
    rows = []
    with oracle.context(path, **(EXACT | {"n_ctx": 8448, "n_batch": 8448, "n_ubatch": 512})) as ctx:
        for batch in batches:
            ctx.memory("clear", 1)
            rows += ctx.decode(batch)
    base, before_it, in_it = rows
    assert not np.array_equal(before_it[11], base[11])
    assert np.array_equal(before_it[12:], base[12:])
    assert (in_it[13:] != base[13:]).any(axis=1).all()


@pytest.mark.parametrize("name", ["mpt-3l-4heads", "bloom-3l-4heads", "jamba-4l"])
def test_without_rope_only_distances_or_nothing_count(oracle: Oracle, write_tiny: Write, name: str) -> None:
    with oracle.context(write_tiny(BY_NAME[name]), n_ctx=256, **EXACT) as ctx:
        (base,) = ctx.decode(OracleBatch.of(TOKENS, logits="all"))
        ctx.memory("clear", 1)
        (moved,) = ctx.decode(OracleBatch.of(TOKENS, 50, logits="all"))
    assert nmse(moved, base) < 1e-9


def test_slopes_of_alibi_show(oracle: Oracle, write_tiny: Write) -> None:
    model = BY_NAME["mpt-3l-4heads"]
    (with_slopes,) = rows_of(oracle, write_tiny(model), TOKENS)
    (without,) = rows_of(oracle, write_tiny(replace(model, max_bias=0.0)), TOKENS)
    assert nmse(without[50:], with_slopes[50:]) > 0.1
