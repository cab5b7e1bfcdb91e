"""Sessions of contexts that share cells, loaded by contexts with a stream for each sequence, and the reverse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny.model import TinyFile
from support.tiny_gguf import TinyModel
from support.verb_setting import MODELS

import pykv
from pykv.errors import NoSlotError, StateError
from pykv.runtime.states import convert

KINDS = ("norm", "gemma3-4l-w16-every2", "falcon-h1-3l", "lfm2-4l-w16", "deepseek2-3l")
PARAMS: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 2, "n_threads": 1, "type_k": "f32", "type_v": "f32"}
TEXT = [i * 7 % 31 for i in range(40)]

Write = Callable[[TinyFile | TinyModel], Path]


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, write_tiny: Write) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(MODELS[request.param])) as loaded:
        yield loaded


def told(ctx: pykv.Context, tokens: list[int], seq_id: int) -> np.ndarray:
    """Decode tokens behind a sequence; returns what follows the last."""
    ctx.decode(pykv.Batch(tokens, seq_id=[seq_id] * len(tokens)))
    return np.array(ctx.logits[-1])


def tell(ctx: pykv.Context) -> None:
    """Let two sequences share a beginning and go on apart."""
    told(ctx, TEXT, 0)
    ctx.memory.seq_cp(0, 1)
    told(ctx, TEXT[5:9], 1)
    told(ctx, TEXT[::-1], 0)


@pytest.mark.parametrize("unified", [True, False])
def test_all_go_on_as_before(model: pykv.Model, unified: bool, tmp_path: Path) -> None:
    with model.context(**PARAMS, kv_unified=unified) as ctx, model.context(**PARAMS, kv_unified=not unified) as other:
        tell(ctx)
        ctx.save_session(tmp_path / "state", TEXT)
        told(other, TEXT[:3], 1)
        before = bytes(other.state_bytes())
        with pytest.raises(StateError):
            other.load_session(tmp_path / "state")
        assert bytes(other.state_bytes()) == before
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is lost
            assert other.load_session(tmp_path / "state", strict=False) == TEXT
        other.memory.check()
        for s in range(2):
            np.testing.assert_allclose(told(other, [3], s), told(ctx, [3], s), rtol=0, atol=2e-5)


@pytest.mark.parametrize("unified", [True, False])
def test_it_is_the_state_that_was_converted_on_disk(model: pykv.Model, unified: bool, tmp_path: Path) -> None:
    session, changed = tmp_path / "session", tmp_path / "changed"
    with model.context(**PARAMS, kv_unified=unified) as ctx:
        tell(ctx)
        ctx.save_session(session)
    convert(session, changed, n_stream=2 if unified else 1)
    with (
        model.context(**PARAMS, kv_unified=not unified) as first,
        model.context(**PARAMS, kv_unified=not unified) as second,
    ):
        first.load_session(session, strict=False)
        second.load_session(changed)
        assert bytes(first.state_bytes()) == bytes(second.state_bytes())


def test_too_little_room_and_too_few_sequences_change_nothing(write_tiny: Write, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pykv.Model.load(write_tiny(MODELS["norm"])) as model, model.context(**PARAMS, kv_unified=True) as ctx:
        for _ in range(8):
            told(ctx, TEXT, 1)
        ctx.save_session(path)
        less = PARAMS | {"n_seq_max": 1, "n_ctx": 256}
        for params, error, message in (
            (PARAMS, NoSlotError, "stream 1: 320 cells of a state, and a stream has 256 cells"),
            (less, StateError, "n_seq_max"),
        ):
            with model.context(**params, kv_unified=False) as other:
                told(other, TEXT, 0)
                before = bytes(other.state_bytes())
                with pytest.raises(error, match=message):
                    other.load_session(path, strict=False)
                assert bytes(other.state_bytes()) == before
