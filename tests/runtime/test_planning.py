"""What is planned is what is allocated afterwards, to the byte; and nothing is allocated before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.quantised import quantise
from support.tiny.model import TinyFile
from support.tiny.registry import BY_ARCH
from support.tiny_gguf import TINY_MODELS, TinyModel

import pykv
from pykv.errors import AllocError, GGUFError, ParamError
from pykv.ggml import Buffer, DType, cpu_device
from pykv.gguf import GGUFFile

KINDS: dict[str, TinyFile] = {**TINY_MODELS, **{arch: next(iter(models.values())) for arch, models in BY_ARCH.items()}}
"""A model of every family."""

SETTINGS: dict[str, dict[str, Any]] = {
    "flash": {"attention": "flash"},
    "matmul": {"attention": "matmul", "n_ubatch": 32},
    "fused": {"attention": "fused", "n_seq_max": 2},
    "streams": {"attention": "flash", "n_seq_max": 3, "kv_unified": False, "n_ctx": 1536},
    "whole windows": {"attention": "flash", "swa_full": True, "n_outputs_max": 7},
    "states back": {"attention": "matmul", "n_rs_seq": 3, "type_k": "f32", "type_v": "f32"},
}


def allocated(path: Path, **params: Any) -> dict[str, int]:
    """Load a model and make a context; returns the bytes that both really take on the CPU."""
    with pykv.Model.load(path, "CPU") as model, model.context(**params) as context:
        file = model.nbytes
        return {
            "weights": sum(n for n in (buffer.nbytes for buffer in model.owners) if n != file),
            "memory": context.memory.nbytes,
            "compute": context.compute_nbytes,
        }


def planned(path: Path, **params: Any) -> dict[str, int]:
    """Return what the plan says of the same."""
    (needs,) = pykv.plan(path, "CPU", **params).devices
    assert sum(needs.kv_by_buffer_type.values()) == needs.kv + needs.states
    return {"weights": needs.weights, "memory": needs.kv + needs.states, "compute": needs.compute}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_is_what_is_allocated(write_tiny: Callable[[TinyFile], Path], kind: str, setting: str) -> None:
    path = write_tiny(KINDS[kind])
    params = {"n_ctx": 512, "n_threads": 1, **SETTINGS[setting]}
    assert outcome(planned, path, params) == outcome(allocated, path, params)


def outcome(how: Callable[..., dict[str, int]], path: Path, params: dict[str, Any]) -> dict[str, int] | str:
    """Return what something says, or why it refuses: a plan refuses what a context does, in the same words."""
    try:
        return how(path, **params)
    except ParamError as error:
        return str(error)


@pytest.mark.parametrize("type_v", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("type_k", ["f16", "bf16", "q8_0", "iq4_nl"])
def test_every_type_of_keys_and_values(tiny_llama_path: Path, type_k: str, type_v: str) -> None:
    params: dict[str, Any] = {"n_ctx": 768, "type_k": type_k, "type_v": type_v, "attention": "flash"}
    assert planned(tiny_llama_path, **params) == allocated(tiny_llama_path, **params)


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.Q5_0, DType.Q8_0])
@pytest.mark.parametrize("repack", [True, False])
def test_weights_that_are_laid_out_anew_take_memory_and_mapped_ones_none(
    tmp_path: Path, dtype: DType, repack: bool
) -> None:
    path = tmp_path / "quantised.gguf"
    quantise(TinyModel(seed=5, n_embd=64, n_ff=96).write(tmp_path / "a.gguf"), dtype, path)
    with pykv.Model.load(path, "CPU", repack=repack) as model:
        own = [buffer.nbytes for buffer in model.owners if buffer.nbytes != model.nbytes]
        (needs,) = pykv.plan(path, "CPU", repack=repack, n_ctx=256, attention="flash").devices
    assert needs.weights == sum(own)
    with GGUFFile(path) as file:
        in_all = sum(tensor.nbytes for tensor in file.tensors.values())
    assert needs.mapped <= in_all
    assert (needs.mapped == in_all) == (not own)


def test_a_plan_allocates_no_memory_for_tensors(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, imagined = Buffer.allocate.__func__, []  # type: ignore[attr-defined]

    def allocate(cls: type[Buffer], arena: Any, kind: Any, purpose: str) -> Buffer:
        assert kind.is_imagined, purpose
        imagined.append(real(cls, arena, kind, purpose))
        return imagined[-1]

    monkeypatch.setattr(Buffer, "allocate", classmethod(allocate))
    monkeypatch.setattr(Buffer, "wrap", None)
    monkeypatch.setattr(GGUFFile, "map", None)  # nor does it look at the weights
    pykv.plan(tiny_llama_path, "CPU", n_ctx=512, attention="matmul")
    assert imagined


def test_a_cache_of_more_than_there_is_can_be_planned(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_ctx = 2**22
    with_free(monkeypatch, 64 << 20)
    plan = pykv.plan(tiny_llama_path, "CPU", n_ctx=n_ctx, attention="flash")
    (needs,) = plan.devices
    with pykv.Model.load(tiny_llama_path, "CPU") as model:
        assert needs.kv == model.memory_plan(n_ctx=n_ctx).nbytes > cpu_device().memory_free
    assert not plan.fits
    assert not needs.fits
    assert plan.suggestions[0].fits
    assert {"n_ctx": plan.largest_n_ctx} in [one.change for one in plan.suggestions]


def test_cells_of_which_not_even_the_bookkeeping_finds_room(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("pykv.runtime.planning.imagined.make_memory", lacks)
    with pytest.raises(AllocError, match="n_ctx=512: no host memory"):
        pykv.plan(tiny_llama_path, "CPU", n_ctx=512)


def with_free(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """Let the CPU have so much free memory."""
    monkeypatch.setattr("pykv.ggml.device.host_memory_available", lambda: n_bytes)


@pytest.mark.parametrize("unified", [True, False])
def test_the_largest_context_that_fits_fits_and_the_next_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool
) -> None:
    path = TinyModel(seed=5, n_ctx_train=2**17).write(tmp_path / "a.gguf")
    params: dict[str, Any] = {"n_seq_max": 2, "kv_unified": unified, "attention": "flash", "n_ubatch": 64}
    with_free(monkeypatch, 40 << 20)
    plan = pykv.plan(path, "CPU", n_ctx=1024, **params)
    step = 256 if unified else 512
    assert plan.fits
    assert 1024 < plan.largest_n_ctx < 2**18
    assert plan.largest_n_ctx % step == 0
    assert pykv.plan(path, "CPU", n_ctx=plan.largest_n_ctx, **params).fits
    assert not pykv.plan(path, "CPU", n_ctx=plan.largest_n_ctx + step, **params).fits


def test_the_largest_context_is_what_the_model_was_trained_for(tiny_llama_path: Path) -> None:
    plan = pykv.plan(tiny_llama_path, "CPU", n_ctx=256, attention="flash", n_seq_max=2)
    assert plan.largest_n_ctx == 2 * plan.n_ctx_train


def test_where_nothing_fits_the_largest_context_is_none(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1000)
    assert pykv.plan(tiny_llama_path, "CPU", n_ctx=512, attention="flash").largest_n_ctx == 0


def test_suggestions_save_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(iter(BY_ARCH["gemma3"].values())).write(tmp_path / "a.gguf")
    params: dict[str, Any] = {"n_ctx": 4096, "attention": "flash", "n_ubatch": 512, "swa_full": True}
    with_free(monkeypatch, 2 << 20)
    plan = pykv.plan(path, "CPU", **params)
    assert not plan.fits
    changes = [set(one.change) for one in plan.suggestions]
    assert {"type_k", "type_v"} in changes
    assert {"swa_full"} in changes
    assert {"n_ubatch"} in changes
    for one in plan.suggestions:
        then = pykv.plan(path, "CPU", **{**params, **one.change})
        assert one.saves == {"CPU": plan.total - then.total}
        assert one.fits == then.fits


def test_what_is_refused(tiny_llama_path: Path, tmp_path: Path) -> None:
    for wrong, named in (
        ({"n_ctx": -1}, "n_ctx=-1"),
        ({"devices": "CUDA9"}, "no device 'CUDA9'"),
        ({"repack": 1}, "repack=1"),
        ({"nctx": 1}, "nctx: no such context parameter"),
        ({"isolate": "maybe"}, "isolate='maybe'"),
        ({"overrides": {99: "CPU"}}, "layer 99"),
    ):
        with pytest.raises(ParamError, match=named):
            pykv.plan(tiny_llama_path, **wrong)
    with pytest.raises(GGUFError):
        pykv.plan(tmp_path / "none.gguf")


def test_a_process_of_its_own_plans_the_same(tiny_llama_path: Path) -> None:
    params: dict[str, Any] = {"n_ctx": 512, "attention": "flash", "type_k": "q8_0"}
    apart, here = (pykv.plan(tiny_llama_path, "CPU", isolate=isolate, **params) for isolate in (True, False))
    assert [(one.weights, one.kv, one.compute) for one in apart.devices] == [
        (one.weights, one.kv, one.compute) for one in here.devices
    ]
    assert [one.change for one in apart.suggestions] == [one.change for one in here.suggestions]
