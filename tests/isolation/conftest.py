"""One isolated model and one in this process, of the same file, for all tests that do not end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.tiny_gguf import TinyModel
from support.twin import EXACT

import pykv

TINY = TinyModel(seed=83, n_layer=2)


@pytest.fixture(scope="session")
def path(write_tiny: Callable[[TinyModel], Path]) -> Path:
    return write_tiny(TINY)


@pytest.fixture(scope="session")
def isolated(path: Path) -> Iterator[pykv.Model]:
    with pykv.Model.load(path, "CPU", isolate=True) as model:
        yield model


@pytest.fixture(scope="session")
def here(path: Path) -> Iterator[pykv.Model]:
    with pykv.Model.load(path, "CPU", isolate=False) as model:
        yield model


@pytest.fixture
def pair(isolated: pykv.Model, here: pykv.Model) -> Iterator[tuple[pykv.Context, pykv.Context]]:
    """Two contexts with the same parameters: isolated, and in this process."""
    params = EXACT | {"n_ctx": 256, "n_seq_max": 3}
    with isolated.context(**params) as there, here.context(**params) as local:
        yield there, local
