"""Contexts saved and loaded: files and bytes in llama.cpp's forms, notes beside them, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.saved_contexts import KINDS, PARAMS, REORDERED, TOKENS, held, next_row, told
from support.tiny.model import TinyFile
from support.tiny_gguf import TinyModel
from support.verb_setting import MODELS

import pykv
from pykv.errors import NoSlotError, ParamError, StateError, UseAfterCloseError
from pykv.models import RopeRequest
from pykv.runtime.states import open_state
from pykv.state_format import read_trailer, side_car, trailer_pieces

TINY = TinyModel(seed=21, n_embd=64, n_head=2, n_head_kv=1, n_ff=64)
OTHER = TinyModel(seed=22, n_embd=64, n_head=2, n_head_kv=1, n_ff=64)


@pytest.fixture
def model(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TINY)) as loaded:
        yield loaded


@pytest.mark.parametrize("dialect", ["10/3", "11/4"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_goes_on_elsewhere(
    kind: str, dialect: str, write_tiny: Callable[[TinyFile | TinyModel], Path], tmp_path: Path
) -> None:
    name = KINDS[kind]
    with pykv.Model.load(write_tiny(MODELS[name])) as model, model.context(**PARAMS) as ctx:
        told(ctx, list(range(40)))
        told(ctx, TOKENS, 2)
        session, sequence = tmp_path / "session", tmp_path / "sequence"
        ctx.save_session(session, TOKENS, dialect=dialect)
        ctx.save_sequence(sequence, 0, range(40), dialect=dialect)
        kept, one, part = ctx.state_bytes(dialect=dialect), ctx.state_bytes(0), ctx.state_bytes(0, partial=True)
        expected = next_row(ctx), next_row(ctx, 2)
        assert len(part) <= len(one) < len(kept)
        for load in (lambda new: new.load_session(session), lambda new: new.load_state_bytes(kept)):
            with model.context(**PARAMS) as new:
                told(new, [1, 2], 1)
                assert load(new) in (TOKENS, None)
                assert new.memory.pos_max(1) == -1
                np.testing.assert_allclose(next_row(new), expected[0], rtol=0, atol=REORDERED)
                np.testing.assert_allclose(next_row(new, 2), expected[1], rtol=0, atol=REORDERED)
        for load in (lambda new: new.load_sequence(sequence, 1), lambda new: new.load_state_bytes(one, 1)):
            with model.context(**PARAMS) as new:
                told(new, TOKENS, 2)
                assert load(new) in (list(range(40)), None)
                np.testing.assert_allclose(next_row(new, 1), expected[0], rtol=0, atol=REORDERED)
                np.testing.assert_allclose(next_row(new, 2), expected[1], rtol=0, atol=REORDERED)
        before = bytes(ctx.state_bytes(0))
        ctx.load_state_bytes(before, 0)
        assert bytes(ctx.state_bytes(0)) == before


def test_notes_come_back(model: pykv.Model, tmp_path: Path) -> None:
    with model.context(**PARAMS) as ctx:
        told(ctx)
        extra, attachments = {"sampler": {"seed": 3, "temp": 0.5}}, {"end of turn 1": b"abc", "empty": b""}
        for name, save in (
            ("session", lambda path: ctx.save_session(path, TOKENS, extra=extra, attachments=attachments)),
            ("sequence", lambda path: ctx.save_sequence(path, 0, TOKENS, extra=extra, attachments=attachments)),
        ):
            nbytes = save(tmp_path / name)
            assert nbytes == (tmp_path / name).stat().st_size
            with open_state(tmp_path / name) as saved:
                assert (saved.extra, saved.attachments) == (extra, attachments)
                assert saved.container.tokens is not None
                assert saved.container.tokens.tolist() == TOKENS
                assert saved.notes is not None
                assert saved.notes.model == model.fingerprint
                assert saved.notes.types == {"k": "f32", "v": "f32"}
                saved.verify()


@pytest.mark.parametrize("kind", ["session", "sequence"])
def test_a_state_of_another_model_made_a_context_talk_nonsense(
    kind: str, model: pykv.Model, write_tiny: Callable[[TinyModel], Path], tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    with pykv.Model.load(write_tiny(OTHER)) as other, other.context(**PARAMS) as ctx:
        told(ctx)
        ctx.save_session(path) if kind == "session" else ctx.save_sequence(path, 0)
    with model.context(**PARAMS) as ctx:
        before = held(told(ctx))
        for strict in (True, False):
            with pytest.raises(StateError, match=f"expected fingerprint {model.fingerprint}"):
                load(ctx, kind, path, strict)
        assert held(ctx) == before


def load(ctx: pykv.Context, kind: str, path: Path, strict: bool = True) -> list[int]:
    if kind == "session":
        return ctx.load_session(path, strict=strict)
    return ctx.load_sequence(path, 0, strict=strict)


@pytest.mark.parametrize("kind", ["session", "sequence"])
def test_without_notes_a_state_is_loaded_with_a_warning(kind: str, model: pykv.Model, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with model.context(**PARAMS) as ctx:
        told(ctx)
        if kind == "session":
            ctx.save_session(path, TOKENS)
            side_car(path).unlink()
        else:
            ctx.save_sequence(path, 0, TOKENS)
            data = path.read_bytes()
            trailer = read_trailer(data)
            assert trailer is not None
            path.write_bytes(data[: trailer.span.start])
        with pytest.warns(RuntimeWarning, match="nothing says which model the state is of"):
            assert load(ctx, kind, path) == TOKENS


def test_other_rotations_are_refused_unless_taken_as_they_are(model: pykv.Model, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with model.context(**PARAMS) as ctx:
        told(ctx).save_sequence(path, 0)
    with model.context(**PARAMS, rope=RopeRequest(freq_base=5e5)) as ctx:
        before = held(ctx)
        with pytest.raises(
            StateError, match=r"rotated otherwise: freq_base is 500000\.0 here, and 10000\.0 in the state"
        ):
            ctx.load_sequence(path, 0)
        assert held(ctx) == before
        with pytest.warns(RuntimeWarning, match="rotated otherwise"):
            ctx.load_sequence(path, 0, strict=False)
        assert ctx.memory.pos_max(0) == len(TOKENS) - 1


@pytest.mark.parametrize("kind", ["session", "sequence"])
def test_one_flipped_bit_is_found(kind: str, model: pykv.Model, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with model.context(**PARAMS) as ctx:
        told(ctx)
        ctx.save_session(path, TOKENS) if kind == "session" else ctx.save_sequence(path, 0, TOKENS)
        before, good = held(ctx), path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for at in range(0, len(good), 97):
                path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
                with pytest.raises(StateError):
                    load(ctx, kind, path)
        assert held(ctx) == before
        path.write_bytes(good)
        assert load(ctx, kind, path) == TOKENS


def test_a_crash_between_the_notes_and_the_session_leaves_the_old_session(model: pykv.Model, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with model.context(**PARAMS) as ctx:
        told(ctx).save_session(path, TOKENS, extra={"turn": 1}, attachments={"a": b"1"})
        old = path.read_bytes()
        told(ctx, [4, 4, 4]).save_session(path, [*TOKENS, 4, 4, 4], extra={"turn": 2})
        new = path.read_bytes()
        for data, turn, attachments in ((old, 1, {"a": b"1"}), (new, 2, {})):
            path.write_bytes(data)
            with open_state(path) as saved:
                assert saved.extra == {"turn": turn}
                assert saved.attachments == attachments
        told(ctx, [6], 1).save_session(path, TOKENS, extra={"turn": 3})
        path.write_bytes(old)  # two sessions ago: these notes are gone
        with pytest.raises(StateError, match="damaged, or not that of the notes beside it"):
            ctx.load_session(path)


def test_forged_notes_do_not_get_further_than_damaged_ones(model: pykv.Model, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with model.context(**PARAMS) as ctx:
        told(ctx).save_sequence(path, 0)
        data = path.read_bytes()
        trailer = read_trailer(data)
        assert trailer is not None
        forged = b"".join(map(bytes, trailer_pieces(trailer.notes, {"x" * 300: b"y"})))
        path.write_bytes(data[: trailer.span.start] + forged)
        ctx.load_sequence(path, 0)
        path.write_bytes(data[: trailer.span.start] + forged[:-1])
        with pytest.raises(StateError):
            ctx.load_sequence(path, 0)


def test_without_room_nothing_changes(model: pykv.Model, tmp_path: Path) -> None:
    with model.context(**PARAMS) as ctx:
        told(ctx, [1] * 200, 0).save_sequence(tmp_path / "saved", 0)
        told(ctx, [2] * 40, 1)
        before = held(ctx)
        with pytest.raises(NoSlotError):
            ctx.load_sequence(tmp_path / "saved", 2)
        assert held(ctx) == before
        ctx.load_sequence(tmp_path / "saved", 0)  # in the place of itself
        assert ctx.memory.pos_max(0) == 199


def test_one_kind_of_file_is_not_taken_for_another(model: pykv.Model, tmp_path: Path) -> None:
    with model.context(**PARAMS) as ctx:
        told(ctx).save_session(tmp_path / "session")
        ctx.save_sequence(tmp_path / "sequence", 0)
        for call, expected, found in (
            (lambda: ctx.load_session(tmp_path / "sequence"), "session file", "sequence file"),
            (lambda: ctx.load_sequence(tmp_path / "session", 0), "sequence file", "session file"),
            (lambda: ctx.load_state_bytes(ctx.state_bytes()[:], 0), "sequence state", "context state"),
            (lambda: ctx.load_state_bytes(ctx.state_bytes(0)), "context state", "sequence state"),
        ):
            with pytest.raises(StateError, match=f"expected a {expected}, found a {found}"):
                call()


def test_a_rotation_that_fits_no_row_lost_the_memory(model: pykv.Model) -> None:
    """It was noticed amid the conversion that `strict=False` asks for, when the cells had been given away."""
    with model.context(**PARAMS) as ctx:
        told(ctx)
        good = ctx.state_bytes(0)
        # magic, id, streams, cells, 8 cells of 3 words, V layout, layers: then the widths of K and of V
        at = 16 + 12 * len(TOKENS) + 8
        before = held(ctx)
        for offset in (at, at + 4):
            for width in (2**31, 4096):
                bad = bytearray(good)
                bad[offset : offset + 4] = width.to_bytes(4, "little")
                with pytest.raises(StateError, match=r"rotation of [KV]: expected 0 or a width that divides every row"):
                    ctx.load_state_bytes(bytes(bad), 0, strict=False)
        assert held(ctx) == before


def test_bad_arguments(model: pykv.Model, tmp_path: Path) -> None:
    ctx = model.context(**PARAMS)
    told(ctx)
    before = held(ctx)
    for call, match in (
        (lambda: ctx.save_sequence(tmp_path / "x", 0, dialect="12/5"), "dialect='12/5': must be one of 10/3, 11/4"),
        (lambda: ctx.save_session(tmp_path / "x", [1.5]), "tokens"),
        (lambda: ctx.save_session(tmp_path / "x", [2**40]), "tokens"),
        (lambda: ctx.save_sequence(tmp_path / "x", 3), "seq_id"),
        (lambda: ctx.state_bytes(7), "seq_id"),
        (lambda: ctx.state_bytes(-1), "seq_id"),
        (lambda: ctx.save_sequence(tmp_path / "x", -1), "seq_id"),
        (lambda: ctx.load_sequence(tmp_path / "x", -1), "seq_id"),
        (lambda: ctx.load_state_bytes(bytes(ctx.state_bytes(0)), -1), "seq_id"),
    ):
        with pytest.raises((ParamError, pykv.errors.SequenceError), match=match):
            call()
    with pytest.raises(ParamError, match=r"extra=.*JSON"):
        ctx.save_session(tmp_path / "x", extra={"a": object()})
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        ctx.load_session(tmp_path / "nothing")
    assert held(ctx) == before
    ctx.close()
    for call in (lambda: ctx.save_session(tmp_path / "x"), ctx.state_bytes, lambda: ctx.load_session("x")):
        with pytest.raises(UseAfterCloseError):
            call()
