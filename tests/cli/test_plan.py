"""``pykv plan``: the table, JSON, what it suggests, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pykv
from pykv.cli.app import app

CONTEXT = ("--ctx", "512", "--attention", "flash", "--device", "CPU")


def ran(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", *args], catch_exceptions=False)


def test_json_holds_what_the_library_says(tiny_llama_path: Path) -> None:
    result = ran("-m", str(tiny_llama_path), *CONTEXT, "--n-seq", "2", "--streams", "--type-k", "q8_0", "--json")
    assert result.exit_code == 0
    plan = pykv.plan(tiny_llama_path, "CPU", n_ctx=512, n_seq_max=2, kv_unified=False, type_k="q8_0", attention="flash")
    told = json.loads(result.output)
    assert (told["n_ctx"], told["n_ctx_seq"]) == (512, 256)
    (cpu,) = told["devices"]
    assert cpu["kv"] == plan.devices[0].kv
    assert cpu["total"] == plan.total == told["total"]
    assert told["fits"] is cpu["fits"] is True


def test_the_table_reads_without_colour(tiny_llama_path: Path) -> None:
    result = ran("-m", str(tiny_llama_path), *CONTEXT)
    assert result.exit_code == 0
    for words in ("keys and values", "scratch to compute", "mapped weights", "free now", "fits", "512 tokens"):
        assert words in result.output
    assert "states" not in result.output  # the model has none


def test_what_does_not_fit_ends_with_1_and_says_what_would(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykv.ggml.device.host_memory_available", lambda: 1 << 20)
    result = ran("-m", str(tiny_llama_path), *CONTEXT, "--ubatch", "256", "--ctx", "4096")
    assert result.exit_code == 1
    assert "too much" in result.output
    assert "try        --type-k q8_0 --type-v q8_0: saves" in result.output
    assert "try        --ctx " in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--type-k", "q7"), "--type-k q7"),
        (("--device", "CUDA9"), "no device 'CUDA9'"),
        (("--tensor-split", "a"), "--tensor-split a"),
    ],
)
def test_a_wrong_command_line_ends_with_2_which_is_no_answer(
    tiny_llama_path: Path, args: tuple[str, ...], said: str
) -> None:
    result = ran("-m", str(tiny_llama_path), *CONTEXT, *args)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_file_that_is_none_ends_with_2(tmp_path: Path) -> None:
    assert ran("-m", str(tmp_path / "none.gguf")).exit_code == 2
