"""SmolLM2's logits in pykv and in real llama.cpp, for the same batches and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nmse import clear_winner, nmse
from support.oracle import Oracle, OracleBatch
from support.paired import Pair
from support.prompts import PROMPTS

import pykv

pytestmark = pytest.mark.oracle

PairOf = Callable[..., Pair]

FLASH = {True: "flash", False: "plain"}
STREAMS = {True: "unified", False: "two-streams"}
SETTINGS = list(product(FLASH, ("f16", "q8_0", "q4_0"), STREAMS))

TOLERANCE = {"f16": 5e-4, "q8_0": 5e-4, "q4_0": 3e-3}
"""Largest NMSE per type of K where the kernels differ."""


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[pykv.Model]:
    with pykv.Model.load(str(smollm2_path)) as model:
        yield model


@pytest.fixture(scope="module")
def pair_of(oracle: Oracle, model: pykv.Model, smollm2_path: Path) -> PairOf:
    """Open the two contexts of one setting."""
    return lambda **params: Pair(oracle, model, smollm2_path, **params)


@pytest.fixture(scope="module")
def prompts(oracle: Oracle, smollm2_path: Path) -> dict[str, list[int]]:
    return {name: oracle.tokenize(smollm2_path, text) for name, text in PROMPTS.items()}


def setting_name(setting: tuple[bool, str, bool]) -> str:
    return f"{FLASH[setting[0]]}-{setting[1]}-{STREAMS[setting[2]]}"


def params_of(flash: bool, type_k: str, unified: bool) -> dict[str, Any]:
    n_ctx = 1024 if unified else 2048
    return {"flash_attn": flash, "type_k": type_k, "kv_unified": unified, "n_ctx": n_ctx, "n_seq_max": 2}


@pytest.mark.parametrize("setting", SETTINGS, ids=setting_name)
def test_prompt_then_forced_tokens_give_llama_cpps_rows(
    pair_of: PairOf,
    prompts: dict[str, list[int]],
    setting: tuple[bool, str, bool],
) -> None:
    flash, type_k, _ = setting
    with pair_of(**params_of(*setting)) as pair:
        for number, (name, tokens) in enumerate(prompts.items()):
            pair.clear()
            seq_id, n_prompt = number % 2, len(tokens) - min(12, len(tokens) // 3)
            wanted = [i < 64 or 480 <= i < 544 or i >= n_prompt - 32 for i in range(n_prompt)]
            rows, expected = pair.decode(OracleBatch.of(tokens[:n_prompt], 0, seq_id, wanted))
            if flash and type_k == "f16":
                assert np.array_equal(rows, expected), (
                    f"{name}: not the same bits, NMSE {nmse(rows, expected)}"
                )
            assert nmse(rows, expected) <= TOLERANCE[type_k], name
            steps = [
                pair.decode(OracleBatch.of(tokens[i : i + 1], i, seq_id))
                for i in range(n_prompt, len(tokens))
            ]
            ours, theirs = (np.concatenate(side) for side in zip(*steps, strict=True))
            assert nmse(ours, theirs) <= TOLERANCE[type_k], f"{name}, single tokens"
            pair.check_positions(2)


@pytest.mark.parametrize("flash", list(FLASH), ids=FLASH.get)
def test_hundred_greedy_tokens_are_llama_cpps_wherever_it_is_sure(
    pair_of: PairOf, prompts: dict[str, list[int]], flash: bool
) -> None:
    prompt = OracleBatch.of(prompts["chat"])
    with pair_of(flash_attn=flash, n_ctx=512) as pair:
        tokens, expected = pair.theirs.greedy(prompt, 100)
        pair.ours.decode(pykv.Batch(prompt.tokens))
        rows = [np.array(pair.ours.logits[-1])]
        for token in tokens[:-1]:
            pair.ours.decode(pykv.Batch([token]))
            rows.append(np.array(pair.ours.logits[-1]))
    ours = np.stack(rows).argmax(axis=1)
    sure = clear_winner(expected, TOLERANCE["f16"])
    assert sure.sum() >= 50, "the prompt leaves too little to compare"
    assert ours[sure].tolist() == np.asarray(tokens)[sure].tolist()


@pytest.mark.parametrize("unified", list(STREAMS), ids=STREAMS.get)
@pytest.mark.parametrize("flash", list(FLASH), ids=FLASH.get)
def test_two_sequences_interleaved_in_one_batch(
    pair_of: PairOf,
    prompts: dict[str, list[int]],
    flash: bool,
    unified: bool,
) -> None:
    a, b = prompts["chat"][:20], prompts["code"][:20]
    batch = OracleBatch(
        tokens=[token for pair in zip(a, b, strict=True) for token in pair],
        pos=[i // 2 for i in range(40)],
        seq_ids=[(i % 2,) for i in range(40)],
        logits=[i % 3 != 1 for i in range(40)],
    )
    with pair_of(**params_of(flash, "f16", unified)) as pair:
        rows, expected = pair.decode(batch)
        assert nmse(rows, expected) <= TOLERANCE["f16"]
        for step in range(3):
            turn = OracleBatch([a[step], b[step]], [20 + step] * 2, [(1,), (0,)], [True, True])
            rows, expected = pair.decode(turn)
            assert nmse(rows, expected) <= TOLERANCE["f16"]
        pair.check_positions(2)


@pytest.mark.parametrize("flash", list(FLASH), ids=FLASH.get)
def test_a_prompt_coupled_to_two_sequences_that_then_part(
    pair_of: PairOf, prompts: dict[str, list[int]], flash: bool
) -> None:
    shared, a, b = prompts["mixed"], prompts["fact"], prompts["code"][:12]
    with pair_of(**params_of(flash, "f16", True)) as pair:
        rows, expected = pair.decode(OracleBatch.of(shared, 0, (0, 1), "all"))
        assert nmse(rows, expected) <= TOLERANCE["f16"]
        tails = OracleBatch(
            tokens=a + b,
            pos=[len(shared) + i for part in (a, b) for i in range(len(part))],
            seq_ids=[(0,)] * len(a) + [(1,)] * len(b),
            logits=[True] * (len(a) + len(b)),
        )
        rows, expected = pair.decode(tails)
        assert nmse(rows, expected) <= TOLERANCE["f16"]
        pair.check_positions(2)


@pytest.mark.parametrize("flash", list(FLASH), ids=FLASH.get)
def test_outputs_in_the_middle_come_in_batch_order(
    pair_of: PairOf, prompts: dict[str, list[int]], flash: bool
) -> None:
    tokens = prompts["mixed"]
    wanted = [i in (3, 17, 18, 40) for i in range(len(tokens))]
    params = {"flash_attn": flash, "n_ctx": 512, "n_ubatch": 16}
    with pair_of(**params) as pair:
        rows, expected = pair.decode(OracleBatch.of(tokens, logits=wanted))
        assert rows.shape == (4, expected.shape[1])
        assert nmse(rows, expected) <= TOLERANCE["f16"]
