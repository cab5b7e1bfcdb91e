"""``pykv demo``: its figures come from the memory, its cell map reads without colour."""

from __future__ import annotations

import json
import re
from io import StringIO

import pytest
from rich.console import Console
from support.tiny_gguf import TinyModel
from typer.testing import CliRunner

from pykv.cli.app import app
from pykv.cli.generate import Pace
from pykv.cli.story import Story

MODEL = TinyModel(seed=1)


@pytest.fixture(scope="module")
def path(write_tiny):
    return str(write_tiny(MODEL))


def demo(*args: str, **environ: str):
    return CliRunner(env=environ).invoke(app, ["demo", "--threads", "1", *args], catch_exceptions=False)


@pytest.fixture(scope="module")
def steps(path):
    result = demo("-m", path, "-n", "6", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["steps"]


def test_steps_come_in_order_with_timings(steps):
    assert list(steps) == ["load", "prefill", "generation", "fork", "together", "trim"]
    assert all(step["seconds"] > 0 for step in steps.values())


def test_fork_shares_every_cell_of_the_conversation(steps):
    assert steps["fork"]["n_shared"] == steps["prefill"]["n_tokens"] + steps["generation"]["n_tokens"]


def test_trim_frees_only_the_last_turn_of_one_branch(steps):
    together = steps["together"]
    assert together["n_apart"] == together["n_used"] + steps["fork"]["n_shared"]
    own_cells = together["n_used"] - steps["fork"]["n_shared"]
    assert 0 < steps["trim"]["n_freed"] < own_cells


def test_map_shows_shared_and_own_cells_and_then_the_gap(path, steps):
    result = demo("-m", path, "-n", "6", NO_COLOR="1", COLUMNS="100")
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    rows = re.findall(r"^ +\d+ ([.A-Z#]{64})$", result.stdout, re.MULTILINE)
    before, after = "".join(rows).split(".", 1)[0], rows[-1]
    assert before.count("#") == steps["fork"]["n_shared"]
    assert before.count("B") == steps["trim"]["n_freed"]
    assert "B" not in after
    assert ". empty   A, B owned by one conversation   # shared by both" in result.stdout


def test_other_model_without_a_template_is_one_line(tmp_path):
    result = demo("-m", str(tmp_path / "absent.gguf"))
    assert result.exit_code == 1
    assert result.stderr.startswith("pykv: error: ")


@pytest.mark.parametrize(("seconds", "speed"), [(10.0, "4.2"), (4.3, "9.8"), (4.2, "10"), (0.3, "140")])
def test_a_slow_machine_was_said_to_make_0_tokens_a_second(seconds, speed):
    out = Console(file=StringIO(), width=200)
    Story(out).pace("generation", "Generation", Pace(42, seconds))
    took = "300.0 ms" if seconds < 1 else f"{seconds:.2f} s"
    assert out.file.getvalue() == f"1. Generation: 42 tokens in {took}, {speed} tokens/s\n"
