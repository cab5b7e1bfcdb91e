"""``pykv rpc-server`` as a process of its own, and a model on what it lends."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.child import child_environment, python_command
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import ParamError

pytestmark = pytest.mark.backend

PYKV = (*python_command("-c", "from pykv.cli import main; main()"),)
TINY = TinyModel(seed=83, n_layer=3)
ALIKE: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "attention": "flash"}
"""The same kernels on both sides: rows are equal, but for what goes astray on the way."""
TOKENS = [5, 9, 2, 7, 7, 1, 30, 12]


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run a server on a free port; yields it and what it says of itself."""
    command = [*PYKV, "rpc-server", "--port", "0", "--threads", "1", "--json", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=30)


def logits(path: Path, devices: list[str], **more: Any) -> np.ndarray:
    """Return the logits behind a few tokens, of a model on these devices."""
    with pykv.Model.load(path, devices, **more) as model, model.context(**ALIKE) as ctx:
        ctx.decode(pykv.Batch(TOKENS))
        return np.array(ctx.logits[-1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TINY.write(tmp_path / "tiny.gguf")


def test_a_model_over_two_servers_and_by_the_numbers_of_their_devices(path: Path) -> None:
    expected = logits(path, ["CPU"])
    with serving() as (_, one), serving("--device", "CPU,CPU") as (_, two):
        assert (one["host"], len(one["devices"]), two["devices"]) == ("127.0.0.1", 1, ["CPU", "CPU"])
        first, second = f"rpc://{one['endpoint']}", f"rpc://{two['endpoint']}"
        for devices, more in (
            ([first, second], {}),
            ([f"{second}/1", first], {"tensor_split": [1, 2]}),
            (["CPU"], {"overrides": {1: f"{second}/0"}}),
        ):
            np.testing.assert_allclose(logits(path, devices, **more), expected, rtol=0, atol=1e-5)
        with pytest.raises(ParamError, match=r"has 2 devices, the first is 0"):
            pykv.Model.load(path, [f"{second}/2"])
        with pytest.raises(ParamError, match=r"overrides: .* has 2 devices; name one of them"):
            pykv.Model.load(path, ["CPU"], overrides={1: second})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_with_0(number: int) -> None:
    with serving() as (process, said):
        assert said["pid"] == process.pid
        process.send_signal(number)
        assert process.wait(timeout=30) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""  # a program that reads it finds nothing but the one line


def test_uploads_are_kept_for_the_next_client(path: Path, tmp_path: Path) -> None:
    with serving("--cache", str(tmp_path / "new" / "cache")) as (_, said):
        logits(path, [f"rpc://{said['endpoint']}"])
    assert (tmp_path / "new" / "cache").is_dir()


def test_run_on_a_server(path: Path) -> None:
    def text(*where: str) -> str:
        command = [
            *PYKV,
            "run",
            "-m",
            str(path),
            "-p",
            "a b c",
            "-n",
            "8",
            "--raw",
            "--temp",
            "0",
            "-c",
            "64",
            "--json",
        ]
        ran = subprocess.run(
            [*command, *where], env=child_environment(), capture_output=True, text=True, check=False, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)["text"]

    with serving() as (_, said):
        assert text("--rpc", said["endpoint"]) == text("--device", "CPU")


def test_run_on_a_server_that_is_away(path: Path) -> None:
    command = [*PYKV, "run", "-m", str(path), "-p", "a", "--rpc", "127.0.0.1:9"]
    ran = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 2
    assert "no server answers" in ran.stderr
