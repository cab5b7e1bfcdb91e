"""Fixtures of tests of states: a memory of every kind, one after the other. A test module gives them its names.

_unpadded, kind, memory = state_memories.unpadded, state_memories.kind, state_memories.memory
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.state_kinds import KINDS, fill, make

from pykv.memory import iswa


@pytest.fixture(autouse=True)
def unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windows have as many cells as asked for, so that they are soon full."""
    monkeypatch.setattr(iswa, "PAD", 1)


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{'unified' if kind[1] else 'streams'}")
def kind(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """A kind of memory, and whether its sequences share cells."""
    found: tuple[str, bool] = request.param
    return found


@pytest.fixture
def memory(kind: tuple[str, bool]) -> Iterator[Any]:
    """A memory of that kind, with something in it."""
    with make(*kind) as one:
        fill(one)
        yield one
