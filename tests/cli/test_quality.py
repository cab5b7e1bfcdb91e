"""``pykv quality``: the table, JSON, the picture, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pykv
from pykv.cli.app import app
from pykv.quality import measure, shift_cut

TEXT = "the keeper of the light counted every step of the stairs and then the fog came in over the sea " * 3


def ran(*args: str) -> Any:
    return CliRunner().invoke(app, ["quality", *args], catch_exceptions=False)


@pytest.fixture
def shift(tiny_llama_path: Path, tmp_path: Path) -> tuple[str, ...]:
    """The start of a command line that shifts."""
    (tmp_path / "text.txt").write_text(TEXT)
    return ("shift", "-m", str(tiny_llama_path), "--text", str(tmp_path / "text.txt"), "--tokens", "60", "--after", "8")


def test_json_holds_what_the_library_says(tiny_llama_path: Path, shift: tuple[str, ...]) -> None:
    types = ("--type-k", "f32", "--type-v", "f32", "--threads", "1")
    told = json.loads(ran(*shift, *types, "--repair", "0,0.5", "--json").output)
    with pykv.Model.load(tiny_llama_path) as model:
        cut = shift_cut(model.tokenizer.encode(TEXT)[:60], 8, 1)
        report = measure(model, cut, (0.0, 0.5), type_k="f32", type_v="f32", n_threads=1)
    assert (told["removed"], told["n_moved"], told["n_after"]) == ([cut.start, cut.end], len(cut.moved), 8)
    assert [run["name"] for run in told["runs"]] == ["rounding", "uncut", "moved", "repaired"]
    for run, expected in zip(told["runs"], report.runs, strict=True):
        assert run["n_recomputed"] == expected.n_recomputed
        assert run["kl"] == pytest.approx(expected.agreement.kl.tolist(), abs=1e-6)


def test_the_table_reads_without_colour(shift: tuple[str, ...]) -> None:
    result = ran(*shift, "--repair", "0,0.5", "--by", "deviation")
    assert result.exit_code == 0
    for words in ("nothing cut", "moved", "50% again", "choosing took"):
        assert words in result.output


def test_a_chunk_that_a_prompt_lacks(shift: tuple[str, ...]) -> None:
    told = json.loads(ran("chunk", *shift[1:], "--cut", "10-20", "--json").output)
    assert (told["removed"], told["n_moved"]) == ([10, 20], 32)


def test_a_picture(shift: tuple[str, ...], tmp_path: Path) -> None:
    assert ran(*shift, "--repair", "0,1", "--plot", str(tmp_path / "a.png")).exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    shift: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykv.quality.drawing.find_spec", lambda _: None)
    result = ran(*shift, "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert "pykv-ggml[plot]" in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--repair", "a"), "--repair a"),
        (("--repair", "2"), "shares from 0 to 1"),
        (("--by", "luck"), "choose='luck'"),
        (("--plot", "/nowhere/a.png"), "cannot be drawn"),
        (("--tokens", "9"), "too few to cut"),
    ],
)
def test_what_is_refused(shift: tuple[str, ...], args: tuple[str, ...], said: str) -> None:
    result = ran(*shift, *args)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_texts_that_cannot_be_read(shift: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for name, said in (("none", "cannot be read"), ("bytes", "is no UTF-8")):
        result = ran(*shift, "--text", str(tmp_path / name))
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
