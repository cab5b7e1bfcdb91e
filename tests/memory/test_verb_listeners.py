"""Listeners hear every verb that a caller made, with all its arguments and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.cell_state import state
from support.kv_scene import run, store_positions

from pykv.errors import ConcurrentUseError, NoSlotError, ParamError, SequenceError, ShiftUnsupported, UseAfterCloseError
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySpec

SPEC = MemorySpec((LayerSpec(1, 32, 32),))


@pytest.fixture
def cache() -> Iterator[KVCache]:
    with KVCache(SPEC, KVSettings(16, n_seq_max=3), n_threads=1) as cache:
        store_positions(cache, run((0, 1), range(4)))
        yield cache


@pytest.fixture
def heard(cache: KVCache) -> list[tuple]:
    calls: list[tuple] = []
    cache.listeners.append(lambda *call: calls.append(call))
    return calls


CALLS = [
    ("clear", (), {}, (True,), None),
    ("clear", (False,), {}, (False,), None),
    ("seq_rm", (0,), {}, (0, -1, -1), True),
    ("seq_rm", (-1,), {"p1": 3}, (-1, -1, 3), True),
    ("seq_cp", (0, 2), {}, (0, 2, -1, -1), None),
    ("seq_cp", (), {"dst": 2, "src": 0, "p0": 1}, (0, 2, 1, -1), None),
    ("seq_keep", (1,), {}, (1,), None),
    ("seq_add", (0, 2, -1), {"delta": 3}, (0, 2, -1, 3), None),
    ("seq_div", (0,), {"d": 2, "p1": -1, "p0": 0}, (0, 0, -1, 2), None),
]


@pytest.mark.parametrize(("verb", "args", "keywords", "told", "outcome"), CALLS)
def test_a_verb_and_all_its_arguments(
    cache: KVCache, heard: list[tuple], verb: str, args: tuple, keywords: dict, told: tuple, outcome: object
) -> None:
    """Verbs within verbs are not told of: moving shared cells copies them first."""
    assert getattr(cache, verb)(*args, **keywords) is outcome
    assert heard == [(verb, told, outcome)]


def test_an_exception_is_told_and_raised(cache: KVCache, heard: list[tuple]) -> None:
    store_positions(cache, run(2, range(12)))  # the cache is full
    refused = [
        (lambda: cache.seq_rm(7), "seq_rm", (7, -1, -1), SequenceError),
        (lambda: cache.seq_cp(0, 9), "seq_cp", (0, 9, -1, -1), SequenceError),
        (lambda: cache.seq_add(0, 0, -1, "x"), "seq_add", (0, 0, -1, "x"), ParamError),
        (lambda: cache.seq_div(0, 0, -1, 0), "seq_div", (0, 0, -1, 0), ParamError),
        (lambda: cache.seq_add(0, 0, -1, 1), "seq_add", (0, 0, -1, 1), ShiftUnsupported),
    ]
    for call, verb, args, error in refused:
        with pytest.raises(error) as caught:
            call()
        assert heard.pop() == (verb, args, caught.value)
        assert heard == []


def test_a_copy_without_room_is_told() -> None:
    with KVCache(SPEC, KVSettings(8, n_seq_max=2, unified=False), n_threads=1) as cache:
        for s in (0, 1):
            store_positions(cache, run(s, range(8)))
        heard: list[tuple] = []
        cache.seq_add(1, 0, -1, 8)
        cache.listeners.append(lambda *call: heard.append(call))
        with pytest.raises(NoSlotError) as caught:
            cache.seq_cp(0, 1, 0, 8)
        assert heard == [("seq_cp", (0, 1, 0, 8), caught.value)]


@pytest.mark.parametrize(
    ("verb", "args", "keywords"),
    [
        ("seq_rm", (), {}), ("seq_rm", (0, 1, 2, 3), {}), ("seq_cp", (0,), {}), ("seq_keep", (), {"seq": 1}),
        ("seq_add", (0, 1, 2), {}), ("seq_div", (0, 0, -1, 2), {"d": 2}), ("clear", (), {"all": True}),
    ],
)  # fmt: skip
def test_what_is_no_call_of_a_verb_is_not_told(
    cache: KVCache, heard: list[tuple], verb: str, args: tuple, keywords: dict
) -> None:
    before = state(cache.streams)
    with pytest.raises(TypeError):
        getattr(cache, verb)(*args, **keywords)
    assert heard == []
    assert state(cache.streams) == before


def test_reads_and_decodes_are_no_verbs(cache: KVCache, heard: list[tuple]) -> None:
    store_positions(cache, run(2, range(3)))
    cache.update()
    cache.k(0, 0), cache.v(0, 0), cache.pos_max(0), cache.cells(), cache.dump(), cache.visible(0, 3), cache.tensors(0)
    cache.store_v(transposed=True)
    assert heard == []


def test_listeners_hear_in_their_order_and_may_leave(cache: KVCache) -> None:
    heard: list[str] = []

    def once(verb: str, *_: object) -> None:
        heard.append("once " + verb)
        cache.listeners.remove(once)

    cache.listeners += [once, lambda verb, *_: heard.append("always " + verb)]
    cache.seq_keep(0)
    cache.seq_rm(0)
    assert heard == ["once seq_keep", "always seq_keep", "always seq_rm"]


def test_a_listener_sees_what_the_verb_has_done(cache: KVCache) -> None:
    seen: list[int] = []
    cache.listeners.append(lambda *_: seen.append(cache.pos_max(0)))
    cache.seq_rm(0, 2, -1)
    cache.seq_add(1, 2, -1, 5)
    assert (seen, cache.pos_max(1)) == ([1, 1], 8)


def test_verbs_of_a_sharing_cache_are_its_own(cache: KVCache, heard: list[tuple]) -> None:
    with KVCache(SPEC, KVSettings(16, n_seq_max=3), other=cache, n_threads=1) as sharing:
        mine: list[tuple] = []
        sharing.listeners.append(lambda *call: mine.append(call))
        sharing.seq_keep(0)
        assert (mine, heard) == ([("seq_keep", (0,), None)], [])
        cache.seq_keep(0)
        assert (len(mine), heard) == (1, [("seq_keep", (0,), None)])


def test_a_closed_cache_tells_nothing(cache: KVCache, heard: list[tuple]) -> None:
    cache.close()
    with pytest.raises(UseAfterCloseError):
        cache.seq_rm(0)
    assert heard == []


def test_the_guard_is_held_while_listeners_hear(cache: KVCache) -> None:
    caught: list[BaseException] = []

    def other_thread() -> None:
        try:
            cache.seq_rm(0)
        except ConcurrentUseError as error:
            caught.append(error)

    def listener(*_: object) -> None:
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()

    cache.listeners.append(listener)
    cache.seq_keep(0)
    assert len(caught) == 1
