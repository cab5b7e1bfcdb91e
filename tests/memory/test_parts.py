"""Parts of a memory: they may be read, but only the whole changes them, and it tells when they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.iswa_memory import FULL, LAYERS, SWA
from support.kv_scene import run, store_positions

from pykv.cells import SwaType, Window
from pykv.errors import ParamError
from pykv.memory import KVSettings, LayerSpec, Memory, MemorySettings, MemorySpec, StateSpec, make_memory
from pykv.memory.verb import step

STATE = LayerSpec.recurrent(StateSpec(4, 6))
WINDOW = Window(4, SwaType.STANDARD)
SPECS = {
    "iswa": MemorySpec(LAYERS, WINDOW),
    "hybrid": MemorySpec((FULL, STATE)),
    "hybrid iswa": MemorySpec((FULL, STATE, SWA), WINDOW),
}

VERBS: dict[str, Callable[[Any], object]] = {
    "seq_rm": lambda part: part.seq_rm(0),
    "seq_cp": lambda part: part.seq_cp(0, 1),
    "seq_keep": lambda part: part.seq_keep(1),
    "seq_add": lambda part: part.seq_add(0, 0, -1, 3),
    "seq_div": lambda part: part.seq_div(0, 0, -1, 2),
    "clear": lambda part: part.clear(),
    "restore": lambda part: part.restore(0, part.snapshot(0)),
    "close": lambda part: part.close(),
}


def make(kind: str) -> Any:
    settings = MemorySettings(KVSettings(64, n_seq_max=2), 8)
    memory = make_memory(SPECS[kind], settings, n_threads=1)
    store_positions(memory, run(0, range(10)), 8)
    return memory


def parts_of(memory: Any) -> list[Memory]:
    """Return all parts, and those of parts."""
    return [one for part in getattr(memory, "parts", ()) for one in (part, *parts_of(part))]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", SPECS)
def test_a_verb_of_a_part_let_it_fall_out_of_step(kind: str, verb: str) -> None:
    with make(kind) as memory:
        before = memory.dump()
        for part in parts_of(memory):
            with pytest.raises(ParamError, match=f"{verb}: this is a part of a memory"):
                VERBS[verb](part)
        assert memory.dump() == before
        memory.check()
        store_positions(memory, run(0, [10]), 8)


@pytest.mark.parametrize("kind", SPECS)
def test_parts_are_read_as_they_are(kind: str) -> None:
    with make(kind) as memory:
        for part in parts_of(memory):
            assert part.pos_max(0) == 9
            assert "9{0}" in part.dump()
            assert part.resumable(0, 10)
            assert part.visible(0, 9).keys() <= memory.visible(0, 9).keys()
            part.update()
            part.check()
            part.cells()
            with part.snapshot(0) as kept:
                assert kept.position == 10


@pytest.mark.parametrize(("kind", "part", "gone"), [("iswa", "base", ()), ("hybrid", "attention", (5,))])
def test_parts_that_end_apart_are_told(kind: str, part: str, gone: tuple) -> None:
    with make(kind) as memory:
        step(getattr(memory, part).seq_rm)(0, *gone)
        with pytest.raises(AssertionError, match="sequence 0"):
            memory.check()


def test_a_part_is_closed_by_the_whole() -> None:
    memory = make("hybrid iswa")
    memory.close()
    memory.close()
    for part in parts_of(memory):
        with pytest.raises(ParamError):
            part.close()
