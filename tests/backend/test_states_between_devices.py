"""What was saved on one device goes on on every other: files and bytes, of every kind of memory and type.

Bytes that were loaded and saved again are the same, wherever they came from: pykv's own on the way there and back,
and what decoding goes on with is what the CPU goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from support.four_devices import DEVICES, Ask, four_devices
from support.saved_contexts import KINDS
from support.tiny.model import TinyFile
from support.verb_setting import MODELS

pytestmark = pytest.mark.backend

WORKER = Path(__file__).parents[1] / "support" / "device_states_worker.py"

MOST = {"f32": 1e-5, "f16": 1e-3, "q8_0": 1e-3}
"""NMSE of logits by types of K and V."""

LACKING = {("states", "f16"), ("states", "q8_0"), ("states and windows", "q8_0"), ("keys alone", "q8_0")}
"""States are f32; and heads of 16 and 48 have no blocks of 32."""

ATTENTION = {"f32": "matmul", "f16": "matmul", "q8_0": "flash"}
"""With multiplied matrices V is stored by channel, if it is not quantised: both orders are carried over."""

STORED = [(kind, dtype) for kind, dtype in product(KINDS, MOST) if (kind, dtype) not in LACKING]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with four_devices(WORKER) as one:
        yield one


@pytest.mark.parametrize(("source", "target"), [*product(DEVICES, repeat=2)])
@pytest.mark.parametrize(("kind", "dtype"), STORED)
def test_saved_here_and_loaded_there(
    ask: Ask,
    write_tiny: Callable[[TinyFile], Path],
    kind: str,
    dtype: str,
    source: str,
    target: str,
) -> None:
    path = write_tiny(MODELS[KINDS[kind]])
    how = {"dtype": dtype, "attention": ATTENTION[dtype], "source": source, "target": target}
    assert ask("carried", path=str(path), **how) <= MOST[dtype]
