"""The plugin of pytest, in a pytest of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.child import child_environment, python_command

BODY = """
def test_one(pykv_device):
    assert pykv_device in ("CPU", "cpu")

def test_other():
    pass
"""


def pytest_run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(BODY)
    command = python_command("-m", "pytest", "-q", "-p", "no:cacheprovider", *args)
    return subprocess.run(
        command, cwd=folder, env=child_environment(), capture_output=True, text=True, check=False, timeout=120
    )


def test_a_test_runs_on_each_device(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--pykv-devices", "CPU,cpu")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_the_cpu_is_the_default(tmp_path: Path) -> None:
    assert "2 passed" in pytest_run(tmp_path).stdout


def test_a_device_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--pykv-devices", "CPU,CUDA9")
    assert done.returncode != 0
    assert "no device 'CUDA9'" in done.stdout + done.stderr


def test_it_is_installed_and_loads_nothing(tmp_path: Path) -> None:
    code = """
import sys
from importlib.metadata import entry_points
(found,) = entry_points(group="pytest11", name="pykv")
found.load()
print("numpy" in sys.modules, "pykv._native" in sys.modules)
"""
    done = subprocess.run(
        python_command("-c", code), env=child_environment(), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
