"""Opening, placing and closing models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import GGUFError, ParamError, UnknownArchitectureError, UseAfterCloseError

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


# lifetime


def test_a_closed_model_makes_no_contexts(path: Path) -> None:
    model = pykv.Model.load(path)
    assert model.nbytes == path.stat().st_size
    model.close()
    model.close()
    assert model.closed
    for use in (model.context, model.memory_plan, lambda: model.tokenizer, model.__enter__):
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
