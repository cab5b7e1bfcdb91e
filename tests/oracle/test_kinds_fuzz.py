"""Random programs of verbs and decodes on every kind of memory that llama.cpp has too, on pykv and on real llama.cpp.

`PYKV_FUZZ_PROGRAMS`, `PYKV_FUZZ_SEED` and `PYKV_FUZZ_FAILURES` mean what they mean in `test_verbs_fuzz.py`; each kind
has its share of the programs, `-k <kind>` runs one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny.model import TinyFile
from support.verb_fuzz import Fuzzer, Report
from support.verb_setting import MODELS, Setting

pytestmark = pytest.mark.oracle

N_PROGRAMS = int(os.environ.get("PYKV_FUZZ_PROGRAMS", "2000"))
SEED = int(os.environ.get("PYKV_FUZZ_SEED", "1"))

KINDS: dict[str, tuple[float, list[Setting]]] = {
    "windows": (
        0.03,
        [
            Setting("gemma3-4l-w16-every2", 1, True, "f32", "f32", False, n_cells=512),
            Setting("gemma3-4l-w16-every2", 3, True, "f32", "f32", False, n_cells=768),
            Setting("gemma3-4l-w16-every2", 3, False, "f16", "f16", True, n_cells=512),
            Setting("gemma2-4l-w32", 1, True, "f16", "f16", True, n_cells=512, n_ubatch=16),
            Setting("gemma2-4l-w32", 2, False, "f32", "f32", False, n_cells=512),
            Setting("gemma2-3l-wide-w16", 3, True, "q8_0", "f16", True, n_cells=768),
            Setting("gemma3-3l-w16-linear", 2, True, "f32", "f32", False, n_cells=512),
        ],
    ),
    "windows in chunks": (
        0.01,
        [
            Setting("llama4-4l", 1, True, "f32", "f32", False, n_cells=512),
            Setting("llama4-4l", 3, True, "f32", "f32", False, n_cells=768),
            Setting("llama4-4l", 2, False, "f16", "f16", True, n_cells=512, n_ubatch=16),
            Setting("llama4-4l", 2, True, "f32", "f32", False, n_cells=512, swa_full=True),
        ],
    ),
    "windows that keep all": (
        0.015,
        [
            Setting("gemma3-4l-w16-every2", 1, True, "f32", "f32", False, n_cells=512, swa_full=True),
            Setting("gemma3-4l-w16-every2", 3, False, "f16", "f16", False, n_cells=512, swa_full=True),
            Setting("gemma2-4l-w32", 3, True, "f32", "f32", False, n_cells=512, swa_full=True),
        ],
    ),
    "windows with sinks": (
        0.02,
        [
            Setting("gpt-oss-4l-w32", 1, True, "f32", "f32", False, n_cells=512),
            Setting("gpt-oss-4l-w32", 3, False, "f16", "f16", True, n_cells=512),
            Setting("gpt-oss-3l-wide-w16-8experts", 3, True, "f32", "f32", False, n_cells=768),
            Setting("gpt-oss-4l-w32", 2, True, "f16", "f16", False, n_cells=512, swa_full=True),
        ],
    ),
    "layer reuse": (0.002, [Setting("gemma3n-22l-w32-f32", 2, True, "f32", "f32", False, n_cells=512)]),
    "states": (
        0.03,
        [
            Setting("mamba2-4l", 1, True, "f32", "f32", False),
            Setting("mamba2-4l", 4, True, "f32", "f32", False),
            Setting("mamba2-2l-8heads-2groups", 3, True, "f32", "f32", False, n_ubatch=8),
            Setting("mamba2-4l", 3, False, "f32", "f32", False),
            Setting("rwkv7-3l", 3, True, "f32", "f32", False),
            Setting("rwkv7-3l", 2, True, "f32", "f32", False, n_ubatch=4),
        ],
    ),
    "states and cells": (
        0.03,
        [
            Setting("falcon-h1-3l", 1, True, "f32", "f32", False),
            Setting("falcon-h1-3l", 3, True, "f32", "f32", False),
            Setting("falcon-h1-3l", 3, False, "f16", "f16", True),
            Setting("lfm2-4l", 3, True, "f16", "f16", True),
            Setting("lfm2-4l", 4, False, "f32", "f32", False, n_ubatch=8),
            Setting("jamba-4l", 3, True, "f32", "f32", False),
            Setting("jamba-4l", 2, False, "f16", "f16", True),
            Setting("qwen3next-4l", 3, True, "f32", "f32", False),
            Setting("qwen3next-4l", 2, False, "f16", "f16", True, n_ubatch=16),
        ],
    ),
    "states that go back": (  # of the families here llama.cpp takes back the states of this one alone
        0.02,
        [
            Setting("lfm2-4l", 1, True, "f32", "f32", False, n_rs_seq=4),
            Setting("lfm2-4l", 3, True, "f32", "f32", False, n_rs_seq=3),
            Setting("lfm2-6l-wide-conv4", 3, False, "f16", "f16", True, n_rs_seq=4, n_ubatch=16),
        ],
    ),
    "states and windows": (
        0.015,
        [
            Setting("lfm2-4l-w16", 1, True, "f32", "f32", False, n_cells=512),
            Setting("lfm2-4l-w16", 3, False, "f32", "f32", False, n_cells=512),
            Setting("lfm2-4l-w16", 3, True, "f16", "f16", True, n_cells=768, n_rs_seq=3),
        ],
    ),
    "keys alone": (
        0.015,
        [
            Setting("deepseek2-3l", 3, True, "f32", "f32", False),
            Setting("deepseek2-4l-qrank", 3, False, "f32", "f32", False),
            Setting("deepseek2-3l", 2, True, "f16", "f16", True),
        ],
    ),
    "slopes": (
        0.015,
        [
            Setting("bloom-3l-4heads", 3, True, "f32", "f32", False),
            Setting("bloom-3l-4heads", 3, False, "f16", "f16", True),
            Setting("mpt-3l-4heads", 2, True, "f32", "f32", False),
        ],
    ),
    "positions of several axes": (
        0.01,
        [
            Setting("qwen2vl-3l", 3, True, "f32", "f32", False),
            Setting("qwen2vl-3l", 3, False, "f32", "f16", False),
        ],
    ),
}
"""Each kind's share of the programs, and what it is run on."""


@pytest.mark.timeout(300 + N_PROGRAMS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.replace(" ", "-"))
def test_random_programs_on_every_kind_of_memory(
    kind: str, write_tiny: Callable[[TinyFile], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    share, settings = KINDS[kind]
    paths = {setting.model: write_tiny(MODELS[setting.model]) for setting in settings}
    fuzzer = Fuzzer(settings, paths, SEED, Path(os.environ.get("PYKV_FUZZ_FAILURES", tmp_path)))
    report: Report = fuzzer.run(range(max(len(settings), round(share * N_PROGRAMS))))
    if report.failure:
        pytest.fail(f"seed {SEED}, {report.failure}", pytrace=False)
    with capsys.disabled():
        print(f"\n{kind}, seed {SEED}: {report}")
    n_cut_short = sum(n for why, n in report.tally.items() if why.startswith("not compared"))
    assert n_cut_short <= max(2, report.tally["programs"] / 4)
