"""Matrices of q5_0 kept as q8_0: the same numbers, and the same logits to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.quantised import quantise
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TinyModel

import pykv
from pykv.ggml import Buffer, DType, cpu_device, from_float, to_float
from pykv.models import widening

TOKENS = list(range(3, 40))


def test_every_block_is_the_same_numbers_as_bytes() -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (20_000, 22), np.uint8)
    blocks[:, :2] = rng.standard_normal(20_000).astype("<f2").view(np.uint8).reshape(-1, 2)
    wide = np.empty(20_000 * 34, np.uint8)
    widening.widen(blocks.reshape(-1), wide)
    expected = to_float(DType.Q5_0, blocks.reshape(-1), 20_000 * 32)
    assert np.array_equal(to_float(DType.Q8_0, wide, 20_000 * 32), expected)
    assert set(np.unique(wide.reshape(-1, 34)[:, 2:].view(np.int8))) == set(range(-16, 16))


def test_a_block_by_hand() -> None:
    """Elements 0 to 31 are 16, -16, 15, and then 0: low halves first, high halves in the upper four bits."""
    block = from_float(DType.Q5_0, np.array([-16, 15, *[0] * 29, -1], np.float32))
    wide = np.empty(34, np.uint8)
    widening.widen(block, wide)
    assert wide[:2].view("<f2")[0] == 1
    assert wide[2:].view(np.int8).tolist() == [-16, 15, *[0] * 29, -1]


@pytest.mark.parametrize("name", [None, "gemma3-4l-w16-every2", "gpt-oss-4l-w32"])
def test_logits_are_those_of_the_matrices_as_they_are_in_the_file(
    name: str | None, write_tiny: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    quantise(write_tiny(TinyModel(seed=5) if name is None else BY_NAME[name]), DType.Q5_0, path)
    found = {}
    for answer in (True, False):
        monkeypatch.setattr(widening, "pays", lambda _, answer=answer: answer)
        with pykv.Model.load(path) as model, model.context(n_ctx=256, n_ubatch=16, n_threads=1) as ctx:
            copied = sum(one.nbytes for one in model.owners if isinstance(one, Buffer) and not one.is_read_only)
            assert bool(copied) is answer
            ctx.decode(pykv.Batch(TOKENS, logits="all"))
            prompt = ctx.logits
            ctx.decode(pykv.Batch([2]))
            found[answer] = np.concatenate((prompt, ctx.logits))
    assert np.array_equal(found[True], found[False])


def test_the_answer_is_one_for_a_process() -> None:
    cpu = cpu_device()
    assert widening.pays(cpu) in (True, False)
    assert widening.pays(cpu) is widening.pays(cpu)
