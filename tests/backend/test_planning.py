"""Plans over devices of which one is not the CPU, held against what is really allocated there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.rpc import rpc_server
from support.tiny.model import TinyFile
from support.tiny.registry import BY_ARCH
from support.tiny_gguf import TinyModel

import pykv
import pykv.ggml
from pykv._native import lib

pytestmark = pytest.mark.backend

KINDS: dict[str, TinyFile] = {
    "plain": TinyModel(seed=80, n_layer=4),
    **{arch: next(iter(BY_ARCH[arch].values())) for arch in ("gemma3", "mamba2", "falcon-h1", "lfm2", "deepseek2")},
}
PADDING = 32
"""Bytes that Vulkan adds to a buffer of host memory, where the CPU's part of a graph lies; ggml's sizes lack them."""

PLACES: dict[str, dict[str, Any]] = {
    "all": {"devices": ["Vulkan0"]},
    "the last layer": {"devices": ["Vulkan0"], "n_gpu_layers": 2},
    "shared out": {"devices": ["Vulkan0", "CPU"], "tensor_split": [1, 1]},
    "layers elsewhere": {"devices": ["CPU"], "overrides": {0: "Vulkan0"}},
    "weights elsewhere": {"devices": ["Vulkan0"], "overrides": {r"ffn_|ssm_": "CPU"}},
}


def allocated(path: Path, params: dict[str, Any], **where: Any) -> dict[str, tuple[int, int]]:
    """Return what each device gives a model and a context: for weights and memory together, and for computing."""
    stored = Counter[str]()
    with pykv.Model.load(path, **where, isolate=False) as model, model.context(**params) as context:
        for buffer in (*model.owners, *context.memory.owners):
            if buffer.nbytes != model.nbytes:  # not the mapped file
                stored[_device_of(buffer)] += buffer.nbytes
        sched = context._compute._sched
        return {one.device.name: (stored[one.device.name], sched.nbytes_on(one)) for one in sched.backends}


def _device_of(buffer: Any) -> str:
    home = lib.ggml_backend_buft_get_device(lib.ggml_backend_buffer_get_type(buffer.ptr))
    return next((one.name for one in pykv.ggml.devices() if one.ptr == home), "CPU")  # whose memory names no device


def planned(path: Path, params: dict[str, Any], **where: Any) -> dict[str, tuple[int, int]]:
    """Return what the plan says of the same."""
    needs = pykv.plan(path, **where, **params, isolate=False).devices
    return {one.name: (one.weights + one.kv + one.states, one.compute) for one in needs}


@pytest.mark.parametrize("attention", ["flash", "matmul"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_is_what_is_allocated(
    write_tiny: Callable[[TinyFile], Path], kind: str, place: str, attention: str
) -> None:
    path = write_tiny(KINDS[kind])
    params = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "attention": attention}
    expected, found = allocated(path, params, **PLACES[place]), planned(path, params, **PLACES[place])
    stored, compute = expected["CPU"]
    assert found["Vulkan0"] == expected["Vulkan0"]
    assert found["CPU"][0] == stored
    assert 0 <= compute - found["CPU"][1] <= PADDING


def test_fewer_layers_are_suggested_where_a_device_is_full(
    write_tiny: Callable[[TinyFile], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(KINDS["plain"])
    params: dict[str, Any] = {"n_ctx": 4096, "n_ubatch": 64, "attention": "flash", "devices": ["Vulkan0"]}
    whole = pykv.plan(path, **params)
    on_vulkan = next(one.total for one in whole.devices if one.name == "Vulkan0")
    free = pykv.ggml.Device.memory_free

    def short(device: Any) -> int:
        return on_vulkan - 1 if device.name == "Vulkan0" else free.fget(device)

    monkeypatch.setattr("pykv.ggml.Device.memory_free", property(short))
    plan = pykv.plan(path, **params)
    assert not plan.fits
    (fewer,) = (one for one in plan.suggestions if "n_gpu_layers" in one.change)
    n = fewer.change["n_gpu_layers"]
    assert fewer.fits
    assert pykv.plan(path, **params, n_gpu_layers=n).fits
    assert not pykv.plan(path, **params, n_gpu_layers=n + 1).fits
    assert any("offload_kqv" in one.change for one in plan.suggestions)


def test_a_remote_device_is_asked_by_a_process_of_its_own(write_tiny: Callable[[TinyFile], Path]) -> None:
    path = write_tiny(KINDS["plain"])
    params: dict[str, Any] = {"n_ctx": 512, "attention": "flash", "n_threads": 1}
    here = {one.name: one for one in pykv.plan(path, ["CPU"], **params).devices}
    with rpc_server(1) as server:
        needs = {one.name: one for one in pykv.plan(path, [f"rpc://{server.endpoint}"], **params).devices}
    remote = needs["RPC0"]
    assert remote.kv == here["CPU"].kv
    assert remote.weights > 0
    assert remote.compute > 0
    assert needs["CPU"].kv == 0
