"""Operations that run elsewhere than where their tensors lie: found, and told once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import FallbackWarning
from pykv.ggml import DType, MisplacedOp, cpu_device, stored_ops
from pykv.runtime.fallbacks import warn_of_fallbacks

CPU = cpu_device()
GPU = replace(CPU, name="GPU0", kind="gpu")


def op(name: str, stored: str, dtype: DType = DType.F16) -> MisplacedOp:
    return MisplacedOp(name, stored, dtype, GPU, CPU)


def test_layers_are_told_together_and_kinds_apart() -> None:
    ops = [op("flash_attn_ext", f"cache_k_l{il}", DType.Q5_1) for il in (4, 0, 1, 2, 9, 8)]
    ops.append(op("set_rows", "cache_v_l7"))
    with pytest.warns(FallbackWarning) as told:
        warn_of_fallbacks(ops)
    first, second = (str(one.message) for one in told)
    assert first.startswith(
        "flash_attn_ext over K of type q5_1 in layers 0 to 2, 4, 8 to 9 runs on CPU, not on GPU0 where it lies"
    )
    assert second.startswith("set_rows over V of type f16 in layer 7 runs on CPU, not on GPU0")
    assert {one.filename for one in told} == {__file__}


def test_nothing_to_tell() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_fallbacks([])


@pytest.mark.parametrize("attention", ["flash", "matmul"])
def test_a_context_finds_each_operation_on_stored_tensors(
    attention: str, write_tiny: Callable[[TinyModel], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's memory taken for a GPU's: everything that touches K and V is elsewhere then, and nothing else."""
    monkeypatch.setattr(stored_ops, "home_of", lambda buffer: GPU)
    model = pykv.Model.load(write_tiny(TinyModel(seed=72, n_layer=2)), "CPU", repack=False)
    with model, model.context(n_ctx=256, n_threads=1, attention=attention) as context:
        compute = context._compute
        ops = stored_ops.stored_ops(compute._build(next(compute._largest(4, 4, ()))).graph)
    reads = {("flash_attn_ext", "k")} if attention == "flash" else {("mul_mat", "k"), ("mul_mat", "v")}
    kinds = reads | {("set_rows", "k"), ("set_rows", "v")}
    assert {(one.name, one.stored) for one in ops} == {
        (name, f"cache_{what}_l{il}") for name, what in kinds for il in range(2)
    }
