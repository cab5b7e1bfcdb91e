"""Bits and bytes that changed on a disk or on a wire, in states of every kind of memory: refused, and nothing changes.

Or they are loaded, where no checksum covers them and nothing tells them from what could have been saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bit_flips import Flipped, flips, map_of
from support.saved_contexts import KINDS, PARAMS, TOKENS, held, told
from support.tiny.model import TinyFile
from support.tiny_gguf import TinyModel
from support.verb_setting import MODELS

import pykv
from pykv.errors import StateError
from pykv.state_format import read_trailer, side_car

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SETTINGS = [*((kind, True) for kind in KINDS), ("cells", False), ("windows", False), ("states and windows", False)]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda one: f"{one[0]}-{'unified' if one[1] else 'streams'}")
def ctx(request: pytest.FixtureRequest, write_tiny: Callable[[TinyFile | TinyModel], Path]) -> Iterator[pykv.Context]:
    """Sequences of 8, 4 and 8 tokens, which every test leaves as they were."""
    kind, unified = request.param
    with (
        pykv.Model.load(write_tiny(MODELS[KINDS[kind]])) as model,
        model.context(**PARAMS, kv_unified=unified) as context,
    ):
        told(context)
        told(context, TOKENS[:4], 1)
        told(context, TOKENS[::-1], 2)
        yield context


def is_refused(ctx: pykv.Context, load: Callable[[], Any], before: Any) -> bool:
    """Load; after a refusal all must be as it was, after a success it must hold together. Other errors are failures."""
    try:
        load()
    except StateError:
        assert held(ctx) == before
        return True
    ctx.memory.check()
    return False


@pytest.mark.parametrize("seq_id", [None, 0])
def test_a_flip_in_bytes_is_refused_or_a_state_that_could_be(ctx: pykv.Context, seq_id: int | None) -> None:
    rng, before = random.Random(7), held(ctx)
    good = bytes(ctx.state_bytes(seq_id))
    others = [bytes(ctx.state_bytes(s)) for s in (1, 2)]
    known = map_of(ctx, good)
    n_refused = 0
    for data, where in flips(good, rng, 12, known.heads):
        if is_refused(ctx, lambda data=data: ctx.load_state_bytes(data, seq_id), before):
            n_refused += 1
            assert not where <= known.rows, "numbers may be any"
            continue
        assert where <= known.rows | known.free, "loaded with another structure"
        if where <= known.rows:
            assert bytes(ctx.state_bytes(seq_id)) == data
        assert seq_id is None or [bytes(ctx.state_bytes(s)) for s in (1, 2)] == others
        ctx.load_state_bytes(before[1])
        assert held(ctx)[1] == before[1]
    assert n_refused


@pytest.mark.parametrize("seq_id", [None, 1])
def test_a_flip_in_bytes_that_may_be_converted_harms_nothing_else(ctx: pykv.Context, seq_id: int | None) -> None:
    rng, before = random.Random(8), held(ctx)
    good = bytes(ctx.state_bytes(seq_id))
    others = [bytes(ctx.state_bytes(s)) for s in (0, 2)]
    for data, _ in flips(good, rng, 8, map_of(ctx, good).heads):
        if not is_refused(ctx, lambda data=data: ctx.load_state_bytes(data, seq_id, strict=False), before):
            assert seq_id is None or [bytes(ctx.state_bytes(s)) for s in (0, 2)] == others
            ctx.load_state_bytes(before[1])


@pytest.mark.parametrize("name", ["session", "sequence"])
def test_a_flip_in_a_file_without_notes(ctx: pykv.Context, tmp_path: Path, name: str) -> None:
    path, rng, before = tmp_path / "state", random.Random(9), held(ctx)
    load = save(ctx, path, name)
    side_car(path).unlink(missing_ok=True)
    good = path.read_bytes()
    trailer = read_trailer(good)
    good = good if trailer is None else good[: trailer.span.start]
    known = map_of(ctx, good)
    for data, where in flips(good, rng, 8, known.heads):
        path.write_bytes(data)
        if not is_refused(ctx, load, before):
            assert where <= known.rows | known.free
            ctx.load_state_bytes(before[1])


@pytest.mark.parametrize("name", ["session", "sequence"])
def test_no_flip_in_a_file_with_notes_is_loaded(ctx: pykv.Context, tmp_path: Path, name: str) -> None:
    """Numbers, cells, tokens, notes: all have a checksum."""
    path, rng, before = tmp_path / "state", random.Random(10), held(ctx)
    load = save(ctx, path, name, extra={"title": "fox"})
    for one in (path, side_car(path)):
        if one.exists():
            for data, where in damaged(ctx, one, rng):
                good = one.read_bytes()
                one.write_bytes(data)
                assert is_refused(ctx, load, before), f"{one.name}: bytes {sorted(where)} were not missed"
                one.write_bytes(good)
    assert load() == TOKENS


def damaged(ctx: pykv.Context, path: Path, rng: random.Random) -> Iterator[Flipped]:
    """Yield a file with flips in its state or, where it has none or something behind it, in the notes."""
    good = path.read_bytes()
    trailer = read_trailer(good)
    n_state = len(good) if trailer is None else trailer.span.start
    if n_state:
        yield from flips(good, rng, 6, map_of(ctx, good[:n_state]).heads)
    if n_state < len(good):
        yield from flips(good, rng, 6, list(range(n_state, len(good))))


def save(ctx: pykv.Context, path: Path, name: str, **remarks: Any) -> Callable[[], list[int]]:
    """Save, and return what loads it again."""
    if name == "session":
        ctx.save_session(path, TOKENS, **remarks)
        return lambda: ctx.load_session(path)
    ctx.save_sequence(path, 0, TOKENS, **remarks)
    return lambda: ctx.load_sequence(path, 0)
