"""``pykv parity``: the table, JSON, the picture, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rewrite_gguf import rewrite
from support.tiny_gguf import TinyModel
from typer.testing import CliRunner

import pykv
from pykv.cli.app import app
from pykv.parity import side

TINY = TinyModel(seed=61, n_layer=3)
ALIKE = ("--attention", "matmul", "--type-k", "f32", "--type-v", "f32", "--threads", "1")


def ran(path: Path, *args: str, devices: str = "CPU,cpu") -> Any:
    command = ["parity", "-m", str(path), "--devices", devices, *ALIKE, *args]
    return CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TINY.write(tmp_path / "a.gguf")


@pytest.fixture
def with_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the device that is spelt "cpu" have wrong values in layer 1."""
    wrong = rewrite(
        TINY, tmp_path / "b.gguf", {"blk.1.attn_v.weight": TINY.weights()["blk.1.attn_v.weight"] * np.float32(2)}, {}
    )
    real = pykv.Model.load

    def load(given: Any, devices: list[str], **more: Any) -> pykv.Model:
        return real(wrong if devices == ["cpu"] else given, devices, **more)

    return lambda: monkeypatch.setattr(side.Model, "load", load)


def test_what_agrees_ends_with_0(path: Path) -> None:
    result = ran(path, "--per-layer")
    assert result.exit_code == 0
    for words in ("attention", "logits", "same", "NMSE by layer"):
        assert words in result.output


def test_what_differs_ends_with_1_and_names_layer_and_operation(path: Path, with_a_fault: Callable[[], None]) -> None:
    with_a_fault()
    result = ran(path, "--per-layer")
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "cpu leaves CPU first in V of layer 1, step 1 (decode of 135 in sequence 0)" in said
    assert "the values of this layer" in said
    assert " !" in result.output  # reads without colour


def test_json_on_stdout_and_in_a_file(path: Path, tmp_path: Path, with_a_fault: Callable[[], None]) -> None:
    with_a_fault()
    result = ran(path, "--json", "-")
    assert result.exit_code == 1
    told = json.loads(result.output)
    assert (told["reference"], told["agrees"]) == ("CPU", False)
    (found,) = told["sides"]
    assert found["verdict"] == "differs"
    assert (found["first"]["kind"], found["first"]["layer"]) == ("V", 1)
    assert [one["layer"] for one in found["distances"]["V"]] == [0, 1, 2]
    assert found["distances"]["logits"][0]["layer"] is None
    assert ran(path, "--json", str(tmp_path / "a.json")).exit_code == 1
    assert json.loads((tmp_path / "a.json").read_text()) == told


def test_a_picture(path: Path, tmp_path: Path) -> None:
    assert ran(path, "--plot", str(tmp_path / "a.svg")).exit_code == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_picture_without_matplotlib(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykv.parity.drawing.find_spec", lambda _: None)
    result = ran(path, "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert "pykv-ggml[plot]" in result.output


@pytest.mark.parametrize(
    ("args", "devices", "said"),
    [
        ((), "CPU", "at least two"),
        ((), "CPU,CUDA9", "no device 'CUDA9'"),
        (("--trace", "/nowhere"), "CPU,cpu", "cannot be read"),
        (("--plot", "/nowhere/a.png"), "CPU,cpu", "cannot be drawn"),
        (("--json", "/nowhere/a.json"), "CPU,cpu", "/nowhere/a.json"),
    ],
)
def test_what_is_refused_ends_with_2(path: Path, args: tuple[str, ...], devices: str, said: str) -> None:
    result = ran(path, *args, devices=devices)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
