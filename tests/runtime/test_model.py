"""Opening, placing and closing models."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import GGUFError, ParamError, UnknownArchitectureError, UseAfterCloseError
from pykv.ggml import Device, cpu_device
from pykv.runtime import model as model_module
from pykv.runtime.model import _choose, _place

TINY = TinyModel(seed=70)


@pytest.fixture
def path(write_tiny: Callable[[TinyModel], Path]) -> Path:
    return write_tiny(TINY)


# what cannot be opened


def test_an_unknown_family_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = TinyModel(arch="qwen2moe").write(tmp_path / "a.gguf")
    with pytest.raises(
        UnknownArchitectureError, match=r"'qwen2moe' is not supported; known: bloom, deepseek2, .*, llama, "
    ):
        pykv.Model.load(path)


def test_files_that_are_no_models(tmp_path: Path, path: Path) -> None:
    whole = path.read_bytes()
    for name, content, message in (
        ("empty", b"", "not a GGUF file"),
        ("text", b"hello", "not a GGUF file"),
        ("head", whole[:40], "damaged or cut off"),
        ("half", whole[: len(whole) // 2], "cut off"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(GGUFError, match=message):
            pykv.Model.load(tmp_path / name)
    with pytest.raises(GGUFError, match="cannot be opened"):
        pykv.Model.load(tmp_path / "nowhere")
    with pytest.raises(GGUFError):
        pykv.Model.load(tmp_path)


# devices


def gpu(i: int) -> Device:
    return replace(cpu_device(), name=f"GPU{i}", kind="gpu")


def homes(chosen: list[Device], n_layer: int, n_gpu_layers: int) -> str:
    """Return where each layer and at last the output go: the digit of a GPU, or c."""
    place = _place(tuple(chosen), n_layer, n_gpu_layers)
    assert place.input == cpu_device()
    return "".join("c" if d.kind == "cpu" else d.name[-1] for d in (*place.layers, place.output))


@pytest.mark.parametrize(
    ("n_devices", "n_layer", "n_gpu_layers", "expected"),
    [
        (1, 4, -1, "00000"),
        (1, 4, 0, "ccccc"),
        (1, 4, 1, "cccc0"),
        (1, 4, 3, "cc000"),
        (1, 4, 4, "c0000"),
        (1, 4, 5, "00000"),
        (1, 4, 99, "00000"),
        (2, 5, -1, "000111"),
        (2, 4, -1, "00011"),
        (2, 4, 2, "ccc01"),
        (3, 5, -1, "001122"),
        (3, 1, -1, "01"),
    ],
)
def test_the_last_layers_go_to_the_devices(n_devices: int, n_layer: int, n_gpu_layers: int, expected: str) -> None:
    assert homes([gpu(i) for i in range(n_devices)], n_layer, n_gpu_layers) == expected


def test_on_the_cpu_everything_is_on_the_cpu() -> None:
    assert homes([cpu_device()], 3, -1) == homes([cpu_device()], 3, 2) == "cccc"


@pytest.mark.parametrize("path", [None, 3])
def test_what_is_no_path_ended_in_a_bare_type_error(path: object) -> None:
    with pytest.raises(ParamError, match=f"path={path} must be the path of a file"):
        pykv.Model.load(path)


@pytest.mark.parametrize("progress", [3, "yes", True])
def test_what_cannot_be_called_told_no_progress(path: Path, progress: object) -> None:
    with pytest.raises(ParamError, match="progress="):
        pykv.Model.load(path, progress=progress)


def test_paths_and_numbers_of_other_types_are_taken(path: Path) -> None:
    with pykv.Model.load(os.fsencode(path), n_gpu_layers=np.int64(1)) as model:
        assert model.path == path


@pytest.mark.parametrize("n", [-2, 1.5, True, "3", "x", None, np.True_])
def test_numbers_of_layers_that_mean_nothing(path: Path, n: object) -> None:
    with pytest.raises(ParamError, match="n_gpu_layers="):
        pykv.Model.load(path, n_gpu_layers=n)


def test_devices_by_name_and_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = cpu_device()
    assert _choose(cpu.name.lower()) == _choose(cpu) == _choose([cpu.name]) == _choose([cpu]) == (cpu,)
    monkeypatch.setattr(model_module, "devices", lambda: (gpu(0), replace(cpu, kind="accel"), gpu(1), cpu))
    assert [device.name for device in _choose(None)] == ["GPU0", "GPU1"]
    monkeypatch.setattr(model_module, "devices", lambda: (cpu,))
    assert _choose(None) == (cpu,)


def test_devices_that_are_not_here(path: Path) -> None:
    with pytest.raises(ParamError, match=r"no device 'CUDA7'; here are .*CPU"):
        pykv.Model.load(path, devices=["CUDA7"])
    with pytest.raises(ParamError, match=r"devices=\[\] must name at least one"):
        pykv.Model.load(path, devices=[])


@pytest.mark.parametrize("given", [3, True, [3], [None], [b"CPU"], {"CPU": None}.values()])
def test_devices_without_a_name_ended_in_a_bare_type_error(path: Path, given: object) -> None:
    with pytest.raises(ParamError, match=r"devices.* must be the name of a device"):
        pykv.Model.load(path, devices=given)


# lifetime


def test_a_closed_model_makes_no_contexts(path: Path) -> None:
    model = pykv.Model.load(path)
    assert model.nbytes == path.stat().st_size
    model.close()
    model.close()
    assert model.closed
    for use in (model.context, model.plan, lambda: model.tokenizer, model.__enter__):
        with pytest.raises(UseAfterCloseError):
            use()


def test_with_closes(path: Path) -> None:
    with pykv.Model.load(path) as model:
        assert not model.closed
    assert model.closed


def test_metadata_read_before_stays_readable(path: Path) -> None:
    with pykv.Model.load(path) as model:
        assert model.metadata["general.architecture"] == "llama"
        assert model.hparams.n_layer == TINY.n_layer
    assert model.metadata["general.architecture"] == "llama"
    with pytest.raises(UseAfterCloseError):
        _ = model.metadata["general.name"]
