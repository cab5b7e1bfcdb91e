"""Case A15 on every device: in which cells a prompt landed, and how many are looked at, must not matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.as_f16 import write_as_f16
from support.four_devices import DEVICES, Ask, four_devices
from support.tiny.model import TinyFile
from support.verb_setting import MODELS

pytestmark = pytest.mark.backend

WORKER = Path(__file__).parents[1] / "support" / "device_twins_worker.py"
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
MOST_F32, MOST = 1e-5, 1e-3
"""NMSE to the CPU's logits: f32 models with K and V in f32, and others."""

LANDED = [list(range(34, 39)), list(range(5))]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with four_devices(WORKER) as one:
        yield one


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with f16 matrices: of Q4_1 the CPU rounds what it multiplies to 8 bits, alone an NMSE up to 3.5e-3."""
    return write_as_f16(smollm2_path, tmp_path_factory.mktemp("f16") / "smollm2.gguf")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pad", [32, 64, 256])
@pytest.mark.parametrize("attention", ["matmul", "flash"])
@pytest.mark.parametrize("name", ["norm", "gemma3-4l-w16-every2"])
def test_the_answer_depended_on_cells_and_padding(
    ask: Ask, write_tiny: Callable[[TinyFile], Path], name: str, attention: str, pad: int, device: str
) -> None:
    how = {"params": {**F32, "attention": attention}, "here": {}, "pad": pad, "n_after": 2}
    told = ask("landed", path=str(write_tiny(MODELS[name])), device=device, **how)
    assert told["cells"] == LANDED
    assert told["nmse"] <= MOST_F32
    assert told["between"] <= MOST_F32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "pad"), [("f16", 32), ("q8_0", 64), ("f16", 256)])
def test_with_a_real_model(ask: Ask, smollm2: Path, dtype: str, pad: int, device: str) -> None:
    params = {"type_k": dtype, "type_v": dtype, "attention": "flash"}
    told = ask("landed", path=str(smollm2), device=device, params=params, here={}, pad=pad, n_after=1)
    assert told["cells"] == LANDED
    assert told["nmse"] <= MOST
    assert told["between"] <= MOST
