"""Every family that pykv builds against what real llama.cpp computed for the same tiny files, as it was recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.nmse import nmse
from support.not_on import bound
from support.oracle import F32Array, OracleBatch
from support.paired import pykv_batch
from support.recorded_logits import MODELS, Outcome, Recording, load, scenario, settings, sha256_of
from support.tiny.model import TinyFile

import pykv
from pykv.models.registry import ARCHITECTURES

TOLERANCE = bound(1e-6, 1e-4)
"""Largest NMSE of one row. The float16 of the recording makes 1.3e-7; a window longer by one, more than 1e-3.

With products rounded to f16, 3.1e-5 was measured on Vulkan."""

AGAIN = "record again: tests/support/recorded_logits.py says how"


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    """Return what llama.cpp gave."""
    return load()


def test_every_family_is_recorded(recordings: dict[str, Recording]) -> None:
    recorded = {model.arch for name, model in MODELS.items() if name in recordings}
    assert set(ARCHITECTURES) - recorded == set(), f"families that lack tiny files or their recording; {AGAIN}"


def test_every_tiny_file_is_recorded_and_nothing_else(recordings: dict[str, Recording]) -> None:
    assert set(recordings) == set(MODELS), AGAIN


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_are_those_of_llama_cpp(
    recordings: dict[str, Recording], write_tiny: Callable[[TinyFile], Path], name: str
) -> None:
    assert name in recordings, f"the tiny file {name} is not recorded; {AGAIN}"
    recording, path = recordings[name], write_tiny(MODELS[name])
    assert sha256_of(path) == recording.sha256, f"the tiny file {name} is not the one that was recorded; {AGAIN}"
    ours, theirs = _on_pykv(MODELS[name], path), recording.outcome
    assert ours.is_cut == theirs.is_cut
    for i, (row, expected) in enumerate(zip(ours.rows, theirs.rows, strict=True)):
        assert nmse(row, expected) <= TOLERANCE, f"row {i}"


def _on_pykv(tiny: TinyFile, path: Path) -> Outcome:
    with pykv.Model.load(path) as model, model.context(**settings(tiny)) as context:

        def decode(batch: OracleBatch) -> F32Array:
            context.decode(pykv_batch(batch))
            return np.array(context.logits)

        return scenario(tiny, decode, lambda verb, *args: getattr(context.memory, verb)(*args))
