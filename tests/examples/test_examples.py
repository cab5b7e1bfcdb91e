"""What the README and the examples promise, they do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny.registry import BY_NAME

from pykv.cli.catalog import ENTRIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def run_example(name: str, cwd: Path | str = "/", **environ: str) -> str:
    """Run an example away from the source folder and return what it prints."""
    command = [sys.executable, str(ROOT / "examples" / name)]
    result = subprocess.run(
        command, env=os.environ | environ, cwd=cwd, capture_output=True, text=True, check=False, timeout=250
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_readme_shows_examples_that_are_run():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    names = ("hello.py", "moves.py", "go_back.py", "attention.py", "save.py")
    assert blocks == [(ROOT / "examples" / name).read_text() for name in names]


@pytest.mark.parametrize("ending", ["&& pykv demo", "&& pytest"])
def test_readme_has_each_command_once_on_one_line(ending):
    lines = [line for line in README.splitlines() if line.endswith(ending)]
    assert len(lines) == 1
    assert lines[0].startswith('pip install ".[')


def test_memory_alone_counts_shared_cells_once():
    # 700 shared + 3 x 50 own; a cell is 32 layers of K and V, 8 heads of 4 blocks of 34 bytes
    mib = 850 * 32 * 2 * 8 * 4 * 34 / 2**20
    first, second = run_example("memory_alone.py").splitlines()
    assert first == f"three branches: 850 cells, {mib:.1f} MiB; unshared they would take 2250"
    assert second == "one ended: 800 cells, the prompt stays for the others"


@pytest.mark.model
def test_hello_forks_one_beginning_into_two_texts(smollm2_path):
    deep, full = run_example("hello.py", PYKV_CACHE=str(smollm2_path.parent)).splitlines()
    assert deep.startswith("The sea is deep and")
    assert full.startswith("The sea is full of")
    assert min(len(deep), len(full)) > len("The sea is deep and") + 8


@pytest.mark.model
def test_moves_leave_the_sequence_that_shares_cells_alone(smollm2_path):
    cells, seen, shape = run_example("moves.py", PYKV_CACHE=str(smollm2_path.parent)).splitlines()
    kept, moved = "0:0{0,1} 1:1{0,1} 2:2{1} 3:3{1} 4:4{1}", "8:2{0}"
    assert cells.startswith(kept)
    assert moved in cells
    assert seen == "{'full': array([0, 1, 2, 3], dtype=int32)}"
    assert shape == "(5, 3, 64)"


def test_going_back_needs_the_snapshot(write_tiny, tmp_path):
    model = BY_NAME["gemma3-7l-w32"]
    shutil.copy(write_tiny(model), tmp_path / ENTRIES["gemma3-270m"].filename)
    could, back, word = run_example("go_back.py", PYKV_CACHE=str(tmp_path)).splitlines()
    assert could.startswith("False 0 ")
    # the last 31 tokens, K and V in f16 of 6 layers with a window
    kib = 31 * 6 * 2 * 2 * model.n_head_kv * model.head_dim / 1024
    assert back == f"back from 1056 tokens to 256: {kib:.0f} KiB kept"
    assert word


@pytest.mark.model
def test_going_back_on_a_real_model_takes_the_window_along(gemma3_path, tmp_path):
    (tmp_path / ENTRIES["gemma3-270m"].filename).symlink_to(gemma3_path)
    could, back, _ = run_example("go_back.py", PYKV_CACHE=str(tmp_path)).splitlines()
    assert could.startswith("False 0 ")
    kib = 256 * 15 * 2 * 2 * 256 / 1024  # all 256 tokens are within a window of 512
    assert back == f"back from 1056 tokens to 256: {kib:.0f} KiB kept"


@pytest.mark.model
def test_attention_shows_six_cells_of_falling_share(smollm2_path):
    rows = [
        line.split("%", 1) for line in run_example("attention.py", PYKV_CACHE=str(smollm2_path.parent)).splitlines()
    ]
    shares, words = [int(share) for share, _ in rows], [word.strip() for _, word in rows]
    assert shares == sorted(shares, reverse=True)
    assert len(rows) == 6
    assert sum(shares) <= 103  # rounded
    assert "'Alice'" in words or "' Alice'" in words or "' hat'" in words or "' is'" in words


def test_a_saved_sequence_is_back_in_another_context(write_tiny, tmp_path):
    shutil.copy(write_tiny(BY_NAME["gemma3-7l-w32"]), tmp_path / ENTRIES["smollm2-135m"].filename)
    line, noted = run_example("save.py", tmp_path, PYKV_CACHE=str(tmp_path)).splitlines()
    n_tokens = int(line.split()[0])
    assert n_tokens > 3
    assert line == f"{n_tokens} tokens back, the next one is at {n_tokens}"
    assert re.fullmatch(rf"the fox \[(\d+, ){{{n_tokens - 1}}}\d+\] [1-9]\d*", noted)
    assert (tmp_path / "fox.ggsq").exists()


def test_agents_md_maps_every_module_that_tests_share():
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "support").rglob("*.py")}
    assert {path for path in mapped_files() if path.startswith("tests/support/")} == here


def mapped_files() -> set[str]:
    """Return the paths that AGENTS.md has a line for: its headings are folders, its first columns files."""
    folder, paths = "", set()
    for line in (ROOT / "AGENTS.md").read_text().splitlines():
        if heading := re.match(r"### (\S+/)$", line):
            folder = heading[1]
        elif line.startswith("### "):
            folder = ""  # rows below name their folder themselves
        elif row := re.match(r"\| `([^`*]+\.py)` \|", line):
            paths.add(folder + row[1])
    return paths


def test_agents_md_maps_every_module_of_pykv():
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pykv").rglob("*.py")}
    modules = {path for path in modules if not path.endswith("/__init__.py")}
    assert sorted(modules - mapped_files()) == [], "modules without a line in AGENTS.md"
    gone = {path for path in mapped_files() if path.startswith("pykv/") and not (ROOT / path).is_file()}
    assert sorted(gone) == [], "lines in AGENTS.md without a file"
