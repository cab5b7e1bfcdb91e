"""Random programs of decodes and verbs on another device and on the CPU: the same cells always, and the same logits.

PYKV_DEVICE_PROGRAMS says how many programs of tiny models each device runs; llvmpipe takes three seconds for one.
What was measured is printed: `pytest -s` shows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.as_f16 import write_as_f16
from support.four_devices import Ask, four_devices
from support.tiny.model import TinyFile
from support.verb_setting import MODELS

pytestmark = pytest.mark.backend

WORKER = Path(__file__).parents[1] / "support" / "device_twins_worker.py"
N_PROGRAMS = int(os.environ.get("PYKV_DEVICE_PROGRAMS", "16"))

ONE: dict[str, Any] = {"kv_unified": True, "n_ctx": 256}
MANY: dict[str, Any] = {"kv_unified": False, "n_ctx": 768}
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("norm", {**ONE, "attention": "matmul"}),
    ("norm", {**MANY, "attention": "flash"}),
    ("gemma3-4l-w16-every2", {**ONE, "attention": "flash"}),
    ("gemma3-4l-w16-every2", {**MANY, "attention": "matmul"}),
    ("mamba2-4l", {**ONE, "n_rs_seq": 2}),
    ("falcon-h1-3l", {**ONE, "attention": "matmul"}),
    ("falcon-h1-3l", {**MANY, "attention": "flash", "n_rs_seq": 3}),
    ("lfm2-4l-w16", {**ONE, "attention": "matmul", "n_rs_seq": 2}),
)
"""Plain, windows, states, both: in one stream and in several.

Not LFM2, whose heads have 16 elements, with flash attention: llvmpipe of Mesa 22.3.6 ends the process in a thread of
its own, amid a decode, also with GGML_VK_DISABLE_F16 set. With multiplied matrices it does not.
"""

MOST_F32, MOST = 1e-5, 1e-3
"""NMSE to the CPU's logits, over all rows of a program: f32 models with K and V in f32, and others."""


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with four_devices(WORKER) as one:
        yield one


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with f16 matrices: of Q4_1 the CPU rounds what it multiplies to 8 bits, alone an NMSE up to 3.5e-3."""
    return write_as_f16(smollm2_path, tmp_path_factory.mktemp("f16") / "smollm2.gguf")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", ["Vulkan0", "RPC0"])
@pytest.mark.parametrize("i", range(len(SETTINGS)), ids=[f"{name}-{i}" for i, (name, _) in enumerate(SETTINGS)])
def test_programs_give_what_the_cpu_gives(
    ask: Ask, write_tiny: Callable[[TinyFile], Path], i: int, device: str
) -> None:
    name, params = SETTINGS[i]
    params = {**params, "type_k": "f32", "type_v": "f32", "n_seq_max": 3}
    numbers = [i * N_PROGRAMS // len(SETTINGS), (i + 1) * N_PROGRAMS // len(SETTINGS)]
    told = ask("programs", path=str(write_tiny(MODELS[name])), device=device, params=params, here={}, numbers=numbers)
    print(device, name, params, told)
    assert told["nmse"] <= MOST_F32, told


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize(("device", "n_steps"), [("Vulkan0", 4), ("RPC0", 12)])
def test_programs_of_a_real_model(ask: Ask, smollm2: Path, device: str, n_steps: int, dtype: str) -> None:
    """Few and short: a token takes llvmpipe a second."""
    params = {"type_k": dtype, "type_v": dtype, "n_seq_max": 3, "attention": "flash"}
    numbers = [1000, 1000 + max(1, N_PROGRAMS // 16)]
    told = ask(
        "programs", path=str(smollm2), device=device, params=params, here={}, numbers=numbers, most_steps=n_steps
    )
    print(device, params, told)
    assert told["nmse"] <= MOST, told
