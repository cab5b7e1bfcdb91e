"""Placement changes nothing: SmolLM2's layers, spread at random over four devices, say what the CPU says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.as_f16 import write_as_f16
from support.four_devices import DEVICES, Ask, four_devices

pytestmark = pytest.mark.backend

WORKER = Path(__file__).parents[1] / "support" / "device_splits_worker.py"
N_LAYER, N_SAID, N_SPLITS = 30, 12, 20
TEXT = "one, two, three, four, five, six,"
"""What follows is clear, so that most of it can be compared."""

TOLERANCE = 1e-3
"""NMSE of logits. What was said is compared where the likeliest token leads by more than that can change."""


def layers_of(number: int) -> list[str]:
    """Return a device for each layer: of even numbers one run a device, of odd ones any for each."""
    rng = Random(number)
    if number % 2:
        return rng.choices(DEVICES, k=N_LAYER)
    ends = sorted(rng.sample(range(1, N_LAYER), len(DEVICES) - 1))
    order = rng.sample(DEVICES, len(DEVICES))
    return [order[sum(il >= end for end in ends)] for il in range(N_LAYER)]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with four_devices(WORKER) as one:
        yield one


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2 with f16 matrices: of Q4_1 the CPU rounds what it multiplies to 8 bits, alone an NMSE up to 3.5e-3."""
    return str(write_as_f16(smollm2_path, tmp_path_factory.mktemp("f16") / "smollm2.gguf"))


@pytest.fixture(scope="module")
def said(ask: Ask, smollm2: str) -> dict[str, Any]:
    return ask("greedy", path=smollm2, text=TEXT, n=N_SAID, tolerance=TOLERANCE)


def test_most_tokens_can_be_compared(said: dict[str, Any]) -> None:
    print(f"{N_SAID - sum(said['clear'])} near ties among {N_SAID} tokens")
    assert sum(said["clear"]) >= N_SAID * 3 // 4, said


@pytest.mark.parametrize("number", range(N_SPLITS))
def test_a_split_says_what_the_cpu_says(ask: Ask, smollm2: str, said: dict[str, Any], number: int) -> None:
    told = ask("split", path=smollm2, layers=layers_of(number), prompt=said["prompt"], tokens=said["tokens"])
    both = zip(told["tokens"], said["tokens"], said["clear"], strict=True)
    assert [mine for mine, _, clear in both if clear] == [
        token for token, clear in zip(said["tokens"], said["clear"], strict=True) if clear
    ]
    print(number, told["nmse"])
    assert told["nmse"] <= TOLERANCE
