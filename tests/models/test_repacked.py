"""Models whose matrices are repacked: the same values, what may not be repacked, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.naive_llama import NaiveLlama
from support.nmse import nmse
from support.quantised import quantise
from support.tiny.registry import BY_NAME
from support.tiny_gguf import TINY_MODELS, TinyModel
from support.twin import EXACT
from support.twin import TOKENS as ANY

import pykv
from pykv._native import lib
from pykv.errors import ParamError
from pykv.ggml import Arena, Buffer, DType, Tensor, can_repack, cpu_device
from pykv.models import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("error")

Q4_0, IQ4_NL, F32 = DType.Q4_0, DType.IQ4_NL, DType.F32

MODELS = TINY_MODELS | BY_NAME
FIRST = {model.arch: name for name, model in reversed(MODELS.items())}
SOME = (
    *FIRST.values(),
    "llama-untied-bias",
    "mpt-2l-positions",
    "deepseek2-3l-unabsorbed",
    "deepseek2-3l-groups-merged",
)
"""A model of each family, and what takes tensors that the first of its family does not."""

TOKENS = [token for token in ANY if token < min(model.n_vocab for model in MODELS.values())]

UNTIED = TinyModel(seed=70, is_tied=False)

CAN = can_repack(cpu_device(), Q4_0, (64, 64))
"""Whether this CPU repacks at all; where it does not, everything here must hold as well."""

SAME = 1e-3
"""NMSE between models in the two layouts, which add up the same products in another order.

Measured 7e-15, or up to 1.1e-4 where an activation then falls to the other side of a step of its 8 bits."""

ACTIVATIONS = 2e-3
"""NMSE of rows whose activations are rounded to 8 bits on the way, against exact ones."""


@pytest.fixture(scope="module")
def quantised(
    write_tiny: Callable[[Any], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("quantised")

    def write(model: Any, dtype: DType = Q4_0) -> tuple[Path, dict[str, np.ndarray]]:
        path = folder / "a.gguf"
        return path, quantise(write_tiny(model), dtype, path)

    return write


def rows(model: pykv.Model) -> np.ndarray:
    """Return the logits of a prompt in two pieces, of single tokens, and of two sequences at once."""
    found = []
    with model.context(n_ctx=256, n_ubatch=16, n_seq_max=2, **EXACT) as context:
        for first, n in ((0, 21), (21, 1), (22, 1), (23, 3)):
            context.decode(pykv.Batch(TOKENS[first : first + n], logits="all"))
            found.append(context.logits)
        context.memory.seq_cp(0, 1)
        context.decode(pykv.Batch(TOKENS[26:36], seq_id=[0, 1] * 5, pos=np.repeat(range(26, 31), 2), logits="all"))
        found.append(context.logits)
    return np.concatenate(found)


def repacked_bytes(model: pykv.Model) -> int:
    return sum(one.nbytes for one in model.owners if isinstance(one, Buffer) and one.arena.is_repacked)


class Readers:
    """Which C functions read repacked tensors, and which tensors rows are looked up in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.functions: set[Any] = set()
        self.tables: set[Tensor] = set()
        node = Arena.node

        def noted(arena: Arena, function: Any, operands: Any, *numbers: Any, **more: Any) -> Tensor:
            homes = [None if one is None else one.base or one for one in operands]
            if any(home is not None and home.arena.is_repacked for home in homes):
                self.functions.add(function)
            if function is lib.ggml_get_rows:
                self.tables.add(homes[0])
            return node(arena, function, operands, *numbers, **more)

        monkeypatch.setattr(Arena, "node", noted)


def test_every_family_is_here() -> None:
    assert set(FIRST) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", SOME)
def test_each_family_computes_the_same_with_repacked_matrices(
    quantised: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And no operation but a product reads one."""
    path, _ = quantised(MODELS[name])
    readers = Readers(monkeypatch)
    with pykv.Model.load(path, repack=False) as model:
        expected = rows(model)
        assert repacked_bytes(model) == 0
        assert readers.functions == set()
    with pykv.Model.load(path) as model:
        found = rows(model)
        assert (repacked_bytes(model) > 0) == CAN
    assert readers.functions <= {lib.ggml_mul_mat, lib.ggml_mul_mat_id}
    assert bool(readers.functions) == CAN
    assert readers.tables
    assert not any(table.arena.is_repacked for table in readers.tables)
    assert nmse(found, expected) <= SAME


@pytest.mark.parametrize("dtype", [Q4_0, IQ4_NL], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("tiny", [UNTIED, TinyModel(seed=71)], ids=["untied", "tied"])
def test_rows_are_those_of_the_naive_forward(quantised: Callable[..., Any], tiny: TinyModel, dtype: DType) -> None:
    path, held = quantised(tiny, dtype)
    naive = NaiveLlama(tiny)
    naive.weights |= {name: values.astype(np.float64) for name, values in held.items()}
    with pykv.Model.load(path) as model:
        assert nmse(rows(model)[:26], naive.decode(TOKENS[:26])) <= ACTIVATIONS


def test_all_matrices_are_repacked_but_the_table(quantised: Callable[..., Any]) -> None:
    path, held = quantised(UNTIED)
    matrices = sum(values.size for name, values in held.items() if name != "token_embd.weight")
    with pykv.Model.load(path) as model:
        assert repacked_bytes(model) == CAN * Q4_0.row_size(matrices)
        assert not model.architecture.tok_embd.arena.is_repacked


def test_tied_embeddings_are_repacked_for_the_output_alone(quantised: Callable[..., Any]) -> None:
    path, held = quantised(TinyModel(seed=71))
    with pykv.Model.load(path) as model:
        table, output = model.architecture.tok_embd, model.architecture.output
        assert (table.arena.is_repacked, output.arena.is_repacked) == (False, CAN)
        assert np.array_equal(table.to_f32()[0, 0], held["token_embd.weight"])


def test_a_file_without_such_matrices_stays_mapped_as_it_is(write_tiny: Callable[[Any], Path]) -> None:
    told: list[tuple[int, int]] = []
    path = write_tiny(UNTIED)
    with pykv.Model.load(path, progress=lambda *step: told.append(step)) as model:
        (buffer,) = model.owners
        assert (buffer.is_read_only, buffer.nbytes) == (True, path.stat().st_size)
    assert len(told) == 1


def test_progress_tells_of_repacking(quantised: Callable[..., Any]) -> None:
    told: list[tuple[int, int]] = []
    path, held = quantised(UNTIED)
    with pykv.Model.load(path, progress=lambda *step: told.append(step)):
        pass
    done = [d for d, _ in told]
    assert done == sorted(done)
    assert {total for _, total in told} == {done[-1]}
    assert len(told) == 1 + CAN * (len(held) - 1)


def test_a_model_that_does_not_fit_beside_its_file_is_not_repacked(
    quantised: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = quantised(UNTIED)
    monkeypatch.setattr("pykv.ggml.device.host_memory_available", lambda: path.stat().st_size - 1)
    with pykv.Model.load(path) as model:
        assert repacked_bytes(model) == 0


def test_beside_another_device_nothing_is_repacked(quantised: Callable[..., Any]) -> None:
    """It may compute long prompts with weights that lie on the CPU, if they lie as they do in the file."""
    path, _ = quantised(UNTIED)
    other = replace(cpu_device(), name="other", kind="gpu", can_wrap_host_memory=False)
    with pykv.Model.load(path, devices=[other], n_gpu_layers=1) as model:
        assert repacked_bytes(model) == 0


@pytest.mark.parametrize("repack", [None, 1, "no"])
def test_repack_is_a_bool(write_tiny: Callable[[Any], Path], repack: Any) -> None:
    with pytest.raises(ParamError, match="repack="):
        pykv.Model.load(write_tiny(UNTIED), repack=repack)
