"""What devices lack, and servers that fail: each ends in a documented exception or a warning, in a living process."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.four_devices import Ask, four_devices
from support.nmse import nmse
from support.rpc import Server, rpc_server
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import AllocError, BackendLost

pytestmark = pytest.mark.backend

WORKER = Path(__file__).parents[1] / "support" / "device_faults_worker.py"
TINY = TinyModel(seed=91, n_layer=2, n_vocab=320)
ODD_HEADS = TinyModel(seed=92, n_layer=2, n_vocab=320, head_dim=36)
TOKENS: list[int] = np.random.default_rng(23).integers(0, 250, 40).tolist()

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with four_devices(WORKER) as one:
        yield one


@pytest.fixture
def path(write_tiny: Callable[[TinyModel], Path]) -> str:
    return str(write_tiny(TINY))


# memory


@pytest.mark.parametrize("n_ctx", [2**24, 2**30])
def test_a_cache_larger_than_the_device(ask: Ask, path: str, n_ctx: int) -> None:
    told = ask("refusal", path=path, device="Vulkan0", context={"n_ctx": n_ctx, "n_batch": 32})
    assert told.startswith(f"AllocError: KV cache of n_ctx={n_ctx} x 1 streams needs ")
    assert "bytes in Vulkan0, which has " in told
    assert ask("answered", path=path, device="Vulkan0", context={})["nmse"] <= 1e-5


def test_keys_beyond_what_the_device_reads_at_once(ask: Ask, path: str) -> None:
    """There is room for them: 256 MiB of keys in a layer, where llvmpipe reads 128 at once."""
    context = {"n_ctx": 2**20, "n_batch": 32, "attention": "flash"}
    told = ask("refusal", path=path, device="Vulkan0", context=context | {"type_k": "f32"})
    assert told.startswith(f"UnsupportedOpError: 'cache_k_l0' is one tensor of {2**20 * 64 * 4} bytes")
    assert "Vulkan0" in told


def test_a_server_out_of_memory_goes_on(path: str) -> None:
    """It may have 1 GiB more of addresses than it has now, and says that the whole machine is free."""
    with rpc_server(1) as server, limited(server, 2**30), pykv.Model.load(path, named(server)) as model:
        assert "RPC" in model.placement.layers[0].name
        with pytest.raises(AllocError, match="has no room for"):
            model.context(n_ctx=2**24, n_batch=32, attention="flash")
        with model.context(n_ctx=256, attention="flash") as ctx:
            ctx.decode(pykv.Batch(TOKENS))
            assert np.isfinite(ctx.logits).all()


# types and heads


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_of_keys_and_values_is_read_or_told(ask: Ask, path: str, dtype: str) -> None:
    """No farther from f32 than the CPU comes with the same type, or little; else a warning names op, type and layers.

    Where bits are few, rounding of what is stored is most of the difference, and falls otherwise on each side.
    """
    told = ask(
        "answered", path=path, device="Vulkan0", context={"type_k": dtype, "type_v": dtype, "attention": "flash"}
    )
    assert told["lost"] <= max(2 * told["lost_on_cpu"], 1e-5)
    for words in told["told"]:
        assert f"of type {dtype} in layers 0 to 1 runs on CPU, not on Vulkan0" in words


@pytest.mark.parametrize("attention", ["flash", "matmul", "auto"])
def test_heads_of_another_size(ask: Ask, write_tiny: Callable[[TinyModel], Path], attention: str) -> None:
    told = ask("answered", path=str(write_tiny(ODD_HEADS)), device="Vulkan0", context={"attention": attention})
    assert told["nmse"] <= 1e-5
    for words in told["told"]:
        assert "of type f16 in layers 0 to 1 runs on CPU, not on Vulkan0" in words


# servers


def test_a_server_that_is_killed_amid_a_conversation(path: str, tmp_path: Path) -> None:
    """The context is lost, and said so; another one on what is left loads what was saved last and goes on."""
    saved = tmp_path / "conversation"
    params: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "type_k": "f32", "type_v": "f32", "attention": "matmul"}
    with rpc_server(1) as other, rpc_server(1) as mortal:
        with pykv.Model.load(path, named(mortal)) as model:
            ctx = model.context(**params)
            ctx.decode(pykv.Batch(TOKENS[:20]))
            ctx.save_sequence(saved, 0, TOKENS[:20])
            ctx.decode(pykv.Batch(TOKENS[20:22]))
            os.kill(mortal.process.pid, signal.SIGKILL)
            mortal.process.wait(30)
            with pytest.raises(BackendLost, match=r"127\.0\.0\.1"):
                say(ctx, TOKENS[22:40])
        for devices in (named(other), ["CPU"]):
            with pykv.Model.load(path, devices) as model, model.context(**params) as ctx:
                assert ctx.load_sequence(saved, 0) == TOKENS[:20]
                ctx.decode(pykv.Batch(TOKENS[20:30], logits="all"))
                assert nmse(ctx.logits, never_lost(path, params)) <= 1e-10


def say(ctx: pykv.Context, tokens: list[int]) -> None:
    for token in tokens:
        ctx.decode(pykv.Batch([token]))


def never_lost(path: str, params: dict[str, Any]) -> np.ndarray:
    """Return what a CPU says that has seen it all."""
    with pykv.Model.load(path, "CPU") as model, model.context(**params) as ctx:
        ctx.decode(pykv.Batch(TOKENS[:20]))
        ctx.decode(pykv.Batch(TOKENS[20:30], logits="all"))
        return np.array(ctx.logits)


def named(server: Server) -> list[str]:
    return [f"rpc://{server.endpoint}"]


@contextmanager
def limited(server: Server, n_more: int) -> Iterator[None]:
    """Let a server have so many bytes of addresses beyond those that it has."""
    pid = server.process.pid
    n_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    most = n_pages * resource.getpagesize() + n_more
    before = resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    yield
    resource.prlimit(pid, resource.RLIMIT_AS, before)
