"""States that a context saved, converted on disk, and loaded by contexts that would refuse them as they were."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.state_bytes import samples
from support.state_values import sequence_file, session_file
from support.tiny.model import TinyFile
from support.tiny_gguf import TinyModel
from support.verb_setting import MODELS

import pykv
from pykv.errors import ParamError, PykvError, StateError
from pykv.runtime.states import compare, convert, describe

TINY = TinyModel(seed=23, n_embd=128, n_head=2, n_head_kv=1, n_ff=64, head_dim=64)
PARAMS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 3, "n_threads": 1, "type_k": "f32", "type_v": "f32"}
TOKENS = [5, 9, 2, 7, 7, 1, 30, 12]

Write = Callable[[TinyFile | TinyModel], Path]


@pytest.fixture
def model(write_tiny: Write) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TINY)) as loaded:
        yield loaded


def told(ctx: pykv.Context, tokens: list[int], seq_id: int) -> None:
    ctx.decode(pykv.Batch(tokens, seq_id=[seq_id] * len(tokens)))


def states_of(ctx: pykv.Context) -> list[bytes]:
    return [bytes(ctx.state_bytes(s)) for s in range(3)]


@pytest.mark.parametrize("change", [
    {"params": {"type_k": "q8_0", "type_v": "q4_0"},
     "options": {"type_k": "q8_0", "type_v": "q4_0", "rotation": (64, 64)}},
    {"params": {"type_k": "f16", "type_v": "bf16"}, "options": {"type_k": "f16", "type_v": "bf16"}},
    {"params": {"flash_attn": False}, "options": {"v_layout": "channel"}},
    {"params": {"flash_attn": False, "type_v": "f16"}, "options": {"v_layout": "channel", "type_v": "f16"}},
    {"params": {"kv_unified": False}, "options": {"n_stream": 3}},
], ids=str)  # fmt: skip
def test_a_file_converted_is_the_state_converted_while_it_is_loaded(model, tmp_path, change):
    with model.context(**PARAMS) as ctx:
        told(ctx, TOKENS, 0)
        told(ctx, TOKENS[::-1] * 3, 1)
        ctx.save_sequence(tmp_path / "one", 1, TOKENS[::-1] * 3)
    convert(tmp_path / "one", tmp_path / "other", **change["options"])
    params = PARAMS | change["params"]
    with model.context(**params) as first, model.context(**params) as second:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            first.load_sequence(tmp_path / "one", 2, strict=False)
        assert second.load_sequence(tmp_path / "other", 2) == TOKENS[::-1] * 3
        assert states_of(first) == states_of(second)
        if "kv_unified" not in change["params"]:  # one sequence is the same beside any number of streams
            with pytest.raises(StateError):
                first.load_sequence(tmp_path / "one", 2)


@pytest.mark.parametrize("name", ["norm", "gemma3-4l-w16-every2", "mamba2-4l", "falcon-h1-3l", "lfm2-4l-w16"])
def test_sequences_of_sessions_of_all_kinds(name: str, write_tiny: Write, tmp_path: Path) -> None:
    """Taken out of a session, a sequence is what it would have been saved as; made a session, it loads alone."""
    session, saved, taken, alone = (tmp_path / one for one in ("session", "saved", "taken", "alone"))
    with pykv.Model.load(write_tiny(MODELS[name])) as model, model.context(**PARAMS) as ctx:
        told(ctx, TOKENS, 0)
        told(ctx, TOKENS[::-1], 2)
        ctx.save_session(session, TOKENS)
        ctx.save_sequence(saved, 2, TOKENS)
        convert(session, taken, to="sequence", seq_id=2)
        assert taken.read_bytes() == saved.read_bytes()
        assert compare(session, saved, seq_id=2).is_identical
        convert(taken, alone, to="session", arch=model.hparams.architecture, seq_id=1)
        with model.context(**PARAMS) as other:
            assert other.load_session(alone) == TOKENS
            told(other, [3], 1)
            told(ctx, [3], 2)
            np.testing.assert_allclose(other.logits[-1], ctx.logits[-1], rtol=0, atol=2e-5)
            assert other.memory.pos_max(0) == -1


def test_damaged_states_end_in_an_error_of_ours_or_in_an_answer(tmp_path: Path) -> None:
    rng = random.Random(6)
    path, other, out = tmp_path / "state", tmp_path / "other", tmp_path / "out"
    bases = []
    for sample in samples():
        state = (session_file if sample.whole else sequence_file)([7, 8])
        bases.append(bytes(state.data + sample.state.data))
    n_refused = 0
    for _ in range(150):
        data = bytearray(rng.choice(bases))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(data)
        other.write_bytes(rng.choice(bases))
        options = {"type_v": rng.choice((None, "f32")), "n_stream": rng.choice((None, 1, 4)), "arch": "llama"}
        for call in (
            lambda: describe(path),
            lambda options=options: convert(path, out, to=rng.choice(("session", "context-state")), **options),
            lambda: compare(path, other),
        ):
            try:
                call()
            except PykvError:
                n_refused += 1
    assert 50 < n_refused < 400


def test_what_is_asked_for_is_checked_before_a_file_is_opened(tmp_path: Path) -> None:
    for options in ({"rotation": (1.5, 0)}, {"rotation": (64,)}, {"n_stream": True}, {"seq_id": -1}, {"dialect": "x"}):
        with pytest.raises(ParamError):
            convert(tmp_path / "missing", tmp_path / "out", **options)  # type: ignore[arg-type]
