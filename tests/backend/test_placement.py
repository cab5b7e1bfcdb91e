"""Models spread over this CPU, llvmpipe and servers on loopback: where tensors lie changes no answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nmse import nmse
from support.rpc import rpc_server
from support.tiny.model import TinyFile
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TinyModel
from support.twin import TOKENS

import pykv
from pykv._native import lib
from pykv.errors import FallbackWarning
from pykv.ggml import BufferType, find_device
from pykv.memory import KV_TYPES, device_support

pytestmark = pytest.mark.backend

TINY = TinyModel(seed=85, n_layer=5, is_tied=False)
EXACT = {"n_ctx": 256, "n_threads": 1, "type_k": "f32", "type_v": "f32", "attention": "matmul"}

SAME = 1e-4
"""NMSE against the CPU with f32 throughout. llvmpipe multiplies f32 matrices by way of f16, which makes 3.8e-5 with all
layers there, or 9e-6 where GGML_VK_DISABLE_F16 is set; a row read from the wrong place makes more than 0.1."""


@pytest.fixture(scope="module")
def names() -> Iterator[list[str]]:
    """All devices. Models that have a part on the server are isolated, so that this process is no client of it."""
    with rpc_server() as server:
        yield ["CPU", "Vulkan0", *(f"rpc://{server.endpoint}/{i}" for i in range(2))]


@pytest.fixture(scope="module")
def path(write_tiny: Callable[[TinyFile], Path]) -> Path:
    return write_tiny(TINY)


def rows(path: Path, **placement: Any) -> list[np.ndarray]:
    """Return the logits of a prompt, of tokens after it, and after a shift."""
    with pykv.Model.load(path, **placement) as model, model.context(**EXACT) as context:
        found = []
        for tokens in (TOKENS[:70], TOKENS[70:71], TOKENS[71:75]):
            context.decode(pykv.Batch(tokens, logits="all"))
            found.append(np.array(context.logits))
        context.memory.seq_rm(0, 3, 13)
        context.memory.seq_add(0, 13, -1, -10)
        context.decode(pykv.Batch(TOKENS[75:78], logits="all"))
        return [*found, np.array(context.logits)]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[np.ndarray]:
    return rows(path, devices="CPU", repack=False)


def distance(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return max(nmse(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_random_splits(seed: int, names: list[str], path: Path, expected: list[np.ndarray]) -> None:
    rng = np.random.default_rng(seed)
    devices = [str(name) for name in rng.permutation(names)]
    split = rng.integers(0, 4, len(names)) + np.eye(len(names), dtype=int)[0]
    overrides = {int(il): str(rng.choice(names)) for il in rng.choice(5, 2, replace=False)}
    found = rows(path, devices=devices, tensor_split=split, n_gpu_layers=int(rng.integers(-1, 7)), overrides=overrides)
    assert distance(found, expected) < SAME


@pytest.mark.parametrize("elsewhere", [{r"ffn_": 0}, {r"ffn_down": 3, r"^output": 0}, {"norm": 0}])
def test_tensors_apart_from_their_layer(
    elsewhere: dict[str, int], names: list[str], path: Path, expected: list[np.ndarray]
) -> None:
    overrides = {pattern: names[i] for pattern, i in elsewhere.items()}
    assert distance(rows(path, devices="Vulkan0", overrides=overrides), expected) < SAME


def test_experts_on_the_cpu(names: list[str], write_tiny: Callable[[TinyFile], Path]) -> None:
    path = write_tiny(BY_NAME["gpt-oss-4l-w32"])
    found = rows(path, devices="Vulkan0", overrides={r"ffn_.*_exps\.": "CPU"})
    assert distance(found, rows(path, devices="CPU", repack=False)) < SAME


def test_k_and_v_lie_with_their_layer(names: list[str], path: Path) -> None:
    """One buffer for each kind of memory, also where the layers of a kind do not follow one another."""
    placed: dict[str, Any] = {"devices": "Vulkan0", "overrides": {1: "CPU", 3: "CPU"}, "isolate": False}
    with pykv.Model.load(path, **placed) as model, model.context(**EXACT) as context:
        owners = [context.memory.tensors(il)[0].owner for il in range(5)]
        assert [owner.is_host for owner in owners] == [False, True, False, True, False]
        assert len({id(owner) for owner in owners}) == 2
        assert sorted(model.memory_plan(**EXACT).nbytes_per_buffer_type) == ["CPU", "Vulkan0"]
    with pykv.Model.load(path, **placed) as model, model.context(**EXACT, offload_kqv=False) as context:
        assert all(context.memory.tensors(il)[0].owner.is_host for il in range(5))


@pytest.mark.parametrize("attention", ["flash", "matmul"])
@pytest.mark.parametrize("type_k", [kind.label for kind in KV_TYPES])
def test_what_a_device_says_to_take_it_takes(type_k: str, attention: str, names: list[str], path: Path) -> None:
    """A context warns of exactly those operations that the device does not take."""
    type_v = "f16" if attention == "matmul" and type_k not in ("f32", "f16", "bf16") else type_k
    head = TINY.head_dim
    takes = {one.dtype.label: one for one in device_support(find_device("Vulkan0")) if one.head_k == one.head_v == head}
    with warnings.catch_warnings(record=True) as told, pykv.Model.load(path, "Vulkan0", isolate=False) as model:
        warnings.simplefilter("always")
        model.context(n_ctx=256, n_threads=1, type_k=type_k, type_v=type_v, attention=attention).close()
    found = {str(one.message).split()[0] for one in told if one.category is FallbackWarning}
    op = "flash_attn_ext" if attention == "flash" else "mul_mat"
    assert (op in found) is not getattr(takes[type_k], attention)
    assert ("set_rows" in found) is not takes[type_k].set_rows


def test_inputs_lie_where_the_device_copies_from(names: list[str], path: Path) -> None:
    """They are written there without a copy, also where the CPU computes some layers."""
    with pykv.Model.load(path, "Vulkan0", overrides={2: "CPU"}, isolate=False) as model, model.context(**EXACT) as ctx:
        ctx.decode(pykv.Batch(TOKENS[:5]))
        inputs = ctx._compute._built.inputs
        kinds = {BufferType(lib.ggml_backend_buffer_get_type(one.tensor.raw.buffer)).name for one in inputs}
        assert kinds == {find_device("Vulkan0").host_buffer_type.name}
        assert not any(one._staged for one in inputs)


def test_the_attention_probe_died_on_llvmpipe(names: list[str], path: Path) -> None:
    with pykv.Model.load(path, "Vulkan0", isolate=False) as model, model.context(n_ctx=1024, n_threads=1) as context:
        assert "measured at 1024 cells: flash" in context.attention_path.reason
        context.decode(pykv.Batch(TOKENS[:70], logits="last"))


def test_attention_away_from_its_cache_is_a_warning(names: list[str], path: Path) -> None:
    told = pytest.warns(FallbackWarning, match="over K of type f16 in layers 0 to 4 runs on CPU, not on Vulkan0")
    with pykv.Model.load(path, "Vulkan0", overrides={"attn_": "CPU"}, isolate=False) as model, told:
        model.context(n_ctx=256, n_threads=1, attention="flash").close()
