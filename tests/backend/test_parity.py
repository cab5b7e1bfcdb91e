"""Parity of the CPU, Vulkan and two RPC servers. Each comparison in a process of its own, as a user runs it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.child import child_environment, python_command
from support.rpc import rpc_server
from support.tiny.model import TinyFile
from support.tiny.registry import BY_ARCH
from support.tiny_gguf import TinyModel

pytestmark = pytest.mark.backend

KINDS: dict[str, TinyFile] = {
    "plain": TinyModel(seed=61, n_layer=3),
    **{arch: next(iter(BY_ARCH[arch].values())) for arch in ("gemma3", "mamba2", "falcon-h1", "deepseek2", "lfm2")},
}
EXACT = ("--type-k", "f32", "--type-v", "f32", "--threads", "1")

IN_F32 = 1e-5
"""NMSE of logits where Vulkan computes in f32, which GGML_VK_DISABLE_F16 asks for; measured at most 7e-6."""

IN_F16 = 2e-4
"""The same where it computes products in f16; measured at most 1.2e-4, of gemma3."""


def parity(path: Path, devices: str, *args: str, in_f32: bool = False) -> dict[str, Any]:
    """Compare devices; returns what the command says in JSON, where rounding explains all."""
    command = python_command("-c", "from pykv.cli import main; main()", "parity", "-m", str(path))
    environment = child_environment() | {"GGML_VK_DISABLE_F16": "1"}
    if not in_f32:
        del environment["GGML_VK_DISABLE_F16"]
    done = subprocess.run(
        [*command, "--devices", devices, "--json", "-", *args],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode in (0, 1), f"{done.returncode}: {done.stdout}{done.stderr}"
    return dict(json.loads(done.stdout))


def nmse(side: dict[str, Any]) -> float:
    return float(side["distances"]["logits"][0]["nmse"])


@pytest.mark.parametrize("kind", KINDS)
def test_vulkan_in_f32_is_within_what_the_types_explain(write_tiny: Callable[[TinyFile], Path], kind: str) -> None:
    told = parity(write_tiny(KINDS[kind]), "CPU,Vulkan0", *EXACT, "--attention", "matmul", in_f32=True)
    assert told["agrees"], told["sides"][0]["first"]
    assert nmse(told["sides"][0]) <= IN_F32


@pytest.mark.parametrize("kind", ["plain", "gemma3", "mamba2"])
def test_vulkan_as_it_comes(write_tiny: Callable[[TinyFile], Path], kind: str) -> None:
    told = parity(write_tiny(KINDS[kind]), "CPU,Vulkan0", *EXACT, "--tolerance", "1e-3")
    assert told["agrees"], told["sides"][0]["first"]
    assert nmse(told["sides"][0]) <= IN_F16


@pytest.mark.parametrize("kind", KINDS)
def test_two_servers_compute_what_the_cpu_does(write_tiny: Callable[[TinyFile], Path], kind: str) -> None:
    """With the CPU's own kernels behind them, and everything shared out over both."""
    with rpc_server(1) as one, rpc_server(1) as two:
        both = f"rpc://{one.endpoint}+rpc://{two.endpoint}"
        told = parity(write_tiny(KINDS[kind]), f"CPU,{both}", *EXACT, "--attention", "matmul")
    (side,) = told["sides"]
    assert side["verdict"] == "same", side["first"]
    assert side["flips"] == []


def test_a_real_model_on_vulkan(smollm2_path: Path) -> None:
    """Its weights are quantised, and the CPU rounds what it multiplies them with to 8 bits: measured 2e-4."""
    told = parity(smollm2_path, "CPU,Vulkan0")
    assert told["agrees"], told["sides"][0]["first"]
    assert nmse(told["sides"][0]) <= 1e-3
