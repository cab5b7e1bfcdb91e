"""Slips of a program that saves its conversations: each is told at once, and nothing is written or changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saved_contexts import KINDS, PARAMS, TOKENS, held, next_row, told
from support.tiny import qwen2vl
from support.tiny.model import TinyFile
from support.tiny_gguf import TinyModel
from support.verb_setting import MODELS

import pykv
from pykv.errors import AttachmentError, NoSlotError, ParamError, SequenceError, StateError, UseAfterCloseError
from pykv.state_format import sequence_head, session_head, side_car

TINY = TinyModel(seed=21, n_embd=64, n_head=2, n_head_kv=1, n_ff=64)
VISION = qwen2vl.MODELS["qwen2vl-2l-wide"]

Write = Callable[[TinyFile | TinyModel], Path]


@pytest.fixture
def ctx(write_tiny: Write) -> Iterator[pykv.Context]:
    with pykv.Model.load(write_tiny(TINY)) as model, model.context(**PARAMS) as one:
        yield one


# tokens


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5, 10**6], r"tokens\[1\]=1000000: must be from 0 to"),
        ([-1], r"tokens\[0\]=-1: must be from 0 to"),
        (range(257), "tokens: 257 of them, and the context holds 256"),
    ],
)
def test_a_file_was_saved_that_no_context_loads(
    tokens: list[int], message: str, ctx: pykv.Context, tmp_path: Path
) -> None:
    told(ctx)
    for save in (
        lambda: ctx.save_sequence(tmp_path / "a", 0, tokens),
        lambda: ctx.save_session(tmp_path / "a", tokens),
    ):
        with pytest.raises(ParamError, match=message):
            save()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_another_conversation_were_noted_in_silence(kind: str, write_tiny: Write, tmp_path: Path) -> None:
    """The prompt alone, saved after the answer; or the tokens of one sequence beside an empty other one."""
    q, n = tmp_path / "q", tmp_path / "n"
    with pykv.Model.load(write_tiny(MODELS[KINDS[kind]])) as model, model.context(**PARAMS) as ctx:
        for n_decoded, n_noted in ((25, 17), (17, 25), (17, 19), (17, 16), (0, 17)):
            ctx.memory.clear()
            if n_decoded:
                told(ctx, list(range(n_decoded)), 1)
            message, noted, n_held = f"{n_noted} tokens are noted, and", list(range(n_noted)), n_decoded or "none"
            with pytest.warns(RuntimeWarning, match=f"^{message} the context holds {n_held}: `tokens` should"):
                ctx.save_session(n, noted)
            with pytest.warns(RuntimeWarning, match=f"^{n}: {message} the state holds {n_held}: "):
                assert ctx.load_session(n) == noted
            with pytest.warns(RuntimeWarning, match=f"^{message} sequence 1 holds {n_held}: `tokens` should"):
                ctx.save_sequence(q, 1, noted)
            with pytest.warns(RuntimeWarning, match=f"^{q}: {message} the state holds {n_held}: "):
                assert ctx.load_sequence(q, 2) == noted


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_were_decoded_and_the_one_sampled_last_are_no_slip(
    kind: str, write_tiny: Write, tmp_path: Path
) -> None:
    """Also those of one conversation of several in a session; warnings are errors here."""
    with pykv.Model.load(write_tiny(MODELS[KINDS[kind]])) as model, model.context(**PARAMS) as ctx:
        for n_noted in (0, 40, 41):
            noted = list(range(n_noted))
            ctx.memory.clear()
            told(ctx, list(range(40)))
            ctx.save_sequence(tmp_path / "q", 0, noted)
            ctx.save_session(tmp_path / "n", noted)
            assert ctx.load_sequence(tmp_path / "q", 1) == noted
            told(ctx, TOKENS, 2)
            ctx.save_session(tmp_path / "m", noted)
            for name in "nm":
                assert ctx.load_session(tmp_path / name) == noted


def test_a_conversation_with_something_cut_out_is_no_slip(ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx, list(range(40)))
    ctx.memory.seq_rm(0, 10, 20)
    left = [*range(10), *range(20, 40)]
    ctx.save_sequence(tmp_path / "q", 0, left)
    assert ctx.load_sequence(tmp_path / "q", 1) == left


def test_pictures_have_cells_and_no_tokens(write_tiny: Write, tmp_path: Path) -> None:
    """Several axes of positions: six patches stand at one position."""
    patches = np.random.default_rng(4).standard_normal((6, VISION.n_embd)).astype(np.float32)
    y, x = np.divmod(np.arange(6), 3)
    with pykv.Model.load(write_tiny(VISION)) as model, model.context(**PARAMS) as ctx:
        told(ctx, [1, 2])
        ctx.decode(pykv.Batch(None, [np.full(6, 2), 2 + y, 2 + x, 0 * x], embd=patches, logits="none"))
        ctx.save_sequence(tmp_path / "q", 0, [1, 2])
        assert ctx.load_sequence(tmp_path / "q", 1) == [1, 2]


def test_embeddings_have_cells_and_no_tokens_in_a_new_context_too(write_tiny: Write, tmp_path: Path) -> None:
    rows = np.random.default_rng(4).standard_normal((6, TINY.n_embd)).astype(np.float32)
    with pykv.Model.load(write_tiny(TINY)) as model:
        with model.context(**PARAMS) as ctx:
            told(ctx, [1, 2])
            ctx.decode(pykv.Batch(None, embd=rows, logits="none"))
            ctx.save_sequence(tmp_path / "q", 0, [1, 2])
            ctx.save_session(tmp_path / "n", [1, 2])
        for name in "qn":
            with model.context(**PARAMS) as ctx:
                load = ctx.load_session if name == "n" else lambda path, ctx=ctx: ctx.load_sequence(path, 0)
                assert load(tmp_path / name) == [1, 2]
                ctx.save_sequence(tmp_path / "again", 0, [1, 2])


# extra


def itself() -> dict[str, Any]:
    one: dict[str, Any] = {}
    one["self"], one["too"] = one, one
    return one


def deep(n: int) -> dict[str, Any]:
    inner: list[Any] = []
    for _ in range(n - 2):
        inner = [inner]
    return {"deep": inner}


@pytest.mark.parametrize("kind", ["session", "sequence"])
@pytest.mark.parametrize("extra", [itself(), deep(101), deep(900), deep(100_000)], ids=["itself", "101", "900", "1e5"])
def test_extra_that_is_too_deep_raised_recursion_error(
    extra: dict[str, Any], kind: str, ctx: pykv.Context, tmp_path: Path
) -> None:
    told(ctx)
    with pytest.raises(ParamError, match="extra: more than 100 lists and dicts within each other"):
        save(ctx, kind, tmp_path / "a", extra=extra)
    assert not list(tmp_path.iterdir())


def save(ctx: pykv.Context, kind: str, path: Path, **remarks: Any) -> int:
    return ctx.save_session(path, **remarks) if kind == "session" else ctx.save_sequence(path, 0, **remarks)


def test_extra_of_a_hundred_levels_comes_back(ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx).save_sequence(tmp_path / "a", 0, extra=deep(100))
    with pykv.open_state(tmp_path / "a") as saved:
        assert saved.extra == deep(100)


@pytest.mark.parametrize("extra", [{"a": {1: 2}}, {"a": [{None: 2}]}, {"a": ({True: 2},)}])
def test_inner_names_that_are_no_text_came_back_as_text(
    extra: dict[str, Any], ctx: pykv.Context, tmp_path: Path
) -> None:
    with pytest.raises(ParamError, match=r"extra: the name (1|None|True) must be a text"):
        told(ctx).save_sequence(tmp_path / "a", 0, extra=extra)
    assert not list(tmp_path.iterdir())


# partial states

PARTIAL = ["windows", "states and cells", "states and windows"]


@pytest.mark.parametrize("whole", [False, True], ids=["sequence", "all"])
@pytest.mark.parametrize("kind", PARTIAL)
def test_what_had_followed_a_partial_state_was_seen_after_going_back(
    kind: str, whole: bool, write_tiny: Write, tmp_path: Path
) -> None:
    """K and V of the tokens behind it stayed: a state went on beside them, with no error and other numbers."""
    seq_id = None if whole else 0
    with pykv.Model.load(write_tiny(MODELS[KINDS[kind]])) as model:
        with model.context(**PARAMS) as ctx:
            expected = next_row(told(ctx, list(range(40))))
        with model.context(**PARAMS) as ctx:
            told(ctx, list(range(40)))
            part = ctx.state_bytes(seq_id, partial=True)
            told(ctx, [8, 9, 10, 11, 12])
            ctx.load_state_bytes(part, seq_id, partial=True)
            assert ctx.memory.pos_max(0) == 39
            assert np.allclose(next_row(ctx), expected, atol=1e-4)  # windows may lie in another order
            ctx.memory.check()


@pytest.mark.parametrize("n_there", [0, 20])
@pytest.mark.parametrize("kind", PARTIAL)
def test_a_partial_state_onto_too_short_a_sequence_says_what_to_do(kind: str, n_there: int, write_tiny: Write) -> None:
    with pykv.Model.load(write_tiny(MODELS[KINDS[kind]])) as model, model.context(**PARAMS) as ctx:
        told(ctx, list(range(40)))
        part = ctx.state_bytes(0, partial=True)
        if n_there:
            told(ctx, list(range(n_there)), 1)
        before = held(ctx)
        with pytest.raises(StateError, match="holds the same tokens up to its end, so decode or load those first"):
            ctx.load_state_bytes(part, 1, partial=True)
        assert held(ctx) == before


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("seq_id", [0, None])
@pytest.mark.parametrize("kind", PARTIAL)
def test_the_flag_of_partial_bytes_mixed_up(kind: str, seq_id: int | None, strict: bool, write_tiny: Write) -> None:
    with pykv.Model.load(write_tiny(MODELS[KINDS[kind]])) as model, model.context(**PARAMS) as ctx:
        told(ctx, list(range(40)))
        part, all_of_it = ctx.state_bytes(seq_id, partial=True), ctx.state_bytes(seq_id)
        before = held(ctx)
        with pytest.raises(StateError, match="pass partial=True"):
            ctx.load_state_bytes(part, seq_id, strict=strict)
        with pytest.raises(StateError, match="pass partial=False"):
            ctx.load_state_bytes(all_of_it, seq_id, partial=True, strict=strict)
        assert held(ctx) == before


# the wrong file


def test_notes_handed_over_in_place_of_their_session(ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx).save_session(tmp_path / "a", TOKENS)
    notes = side_car(tmp_path / "a")
    for load in (ctx.load_session, lambda path: ctx.load_sequence(path, 0), pykv.open_state):
        with pytest.raises(StateError, match=f"^{notes}: holds the notes on a session, not the session; that is .*/a$"):
            load(notes)


def test_no_bytes_are_called_so(ctx: pykv.Context) -> None:
    for seq_id in (0, None):
        with pytest.raises(StateError, match="data: no bytes"):
            ctx.load_state_bytes(b"", seq_id)


def test_a_model_handed_over_in_place_of_a_state(ctx: pykv.Context, write_tiny: Write) -> None:
    path = write_tiny(TINY)
    for load in (ctx.load_session, lambda path: ctx.load_sequence(path, 0), pykv.open_state):
        with pytest.raises(StateError, match=f"^{path}: a GGUF model, not a saved state: pykv.Model.load reads it"):
            load(path)


# names


@pytest.mark.parametrize("kind", ["session", "sequence"])
def test_a_save_under_the_name_of_notes_spoiled_their_session(kind: str, ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx).save_session(tmp_path / "v", TOKENS)
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    assert sorted(before) == ["v", "v.pykv"]
    with pytest.raises(ParamError, match=r"v\.pykv': has the name of the notes on the session .*/v; take another"):
        save(ctx, kind, tmp_path / "v.pykv")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before
    assert ctx.load_session(tmp_path / "v") == TOKENS


def test_notes_on_a_session_replaced_a_saved_sequence(ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx).save_sequence(tmp_path / "v.pykv", 0, TOKENS)  # no session beside it: a name like any other
    ctx.save_sequence(tmp_path / "v.pykv", 0, TOKENS)
    with pytest.raises(ParamError, match=r"notes on it would replace .*v\.pykv, which is a sequence file"):
        ctx.save_session(tmp_path / "v", TOKENS)
    assert os.listdir(tmp_path) == ["v.pykv"]
    assert ctx.load_sequence(tmp_path / "v.pykv", 0) == TOKENS


def test_a_save_in_a_folder_that_is_gone_names_the_path(
    ctx: pykv.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(ctx)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for kind in ("session", "sequence"):
        with pytest.raises(FileNotFoundError, match="working directory is gone; nothing was written: 'x'"):
            save(ctx, kind, Path("x"))


@pytest.mark.parametrize("seq_id", ["0", None, True, 0.0])
def test_a_sequence_of_another_type_was_told_the_range_alone(seq_id: Any, ctx: pykv.Context, tmp_path: Path) -> None:
    with pytest.raises(SequenceError, match=f"an integer is needed, not {type(seq_id).__name__}"):
        ctx.save_sequence(tmp_path / "a", seq_id)


# open_state


def test_a_state_opened_without_with(ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx).save_sequence(tmp_path / "a", 0, TOKENS, extra={"turn": 1}, attachments={"prompt": b"abc"})
    saved = pykv.open_state(tmp_path / "a")
    assert (saved.kind, saved.tokens, saved.extra) == ("sequence file", TOKENS, {"turn": 1})
    words = repr(saved)
    for word in (str(tmp_path / "a"), "sequence file", "8 tokens", "turn", "prompt"):
        assert word in words
    assert len(words) < 300 + len(str(tmp_path))
    kept = saved.attachments["prompt"]
    saved.close()
    saved.close()
    assert repr(saved).endswith("closed>")
    assert (bytes(kept), saved.tokens) == (b"abc", TOKENS)
    for use in (saved.verify, saved.parsed, saved.__enter__):
        with pytest.raises(UseAfterCloseError, match="closed"):
            use()


def test_a_missing_attachment_raised_the_bare_name(ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx).save_session(tmp_path / "a", attachments={"prompt": b"abc", "turn 1": b""})
    ctx.save_session(tmp_path / "none")
    with pykv.open_state(tmp_path / "a") as saved:
        with pytest.raises(AttachmentError, match=r"^attachments\['nope'\]: no such .*; it has 'prompt', 'turn 1'$"):
            saved.attachments["nope"]
        with pytest.raises(KeyError):
            saved.attachments["nope"]
        assert saved.attachments.get("nope") is None
    with pykv.open_state(tmp_path / "none") as saved, pytest.raises(AttachmentError, match="it has none"):
        saved.attachments["nope"]


def test_a_file_that_is_not_opened_stays_unmapped(ctx: pykv.Context, tmp_path: Path) -> None:
    """What fails while a file is opened lets go of it; so does the end of a with statement."""
    told(ctx).save_sequence(tmp_path / "a", 0, TOKENS)
    with pykv.open_state(tmp_path / "a") as saved:
        assert not saved.data.closed
    assert saved.data.closed


# what to do next


def test_errors_and_warnings_name_the_file_and_the_next_step(ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx).save_session(tmp_path / "a", TOKENS)
    side_car(tmp_path / "a").unlink()
    with pytest.warns(
        RuntimeWarning, match=rf"{tmp_path / 'a'}: nothing says.*copied without .*a\.pykv, copy that too"
    ):
        ctx.load_session(tmp_path / "a")
    ctx.save_sequence(tmp_path / "q", 0, TOKENS)
    data = (tmp_path / "q").read_bytes()
    (tmp_path / "q").write_bytes(data[:-60] + b"\0" + data[-59:])
    with pytest.raises(
        StateError, match=f"^{tmp_path / 'q'}: the notes behind the state are damaged: .*; take another"
    ):
        ctx.load_sequence(tmp_path / "q", 0)
    ctx.memory.clear()
    told(ctx, [1] * 200, 0).save_sequence(tmp_path / "long", 0)
    with pytest.raises(NoSlotError, match=f"^{tmp_path / 'long'}: 200 cells .*; remove other sequences first, or give"):
        ctx.load_sequence(tmp_path / "long", 1)


def test_forged_tokens_are_still_refused(ctx: pykv.Context, tmp_path: Path) -> None:
    state = bytes(told(ctx).state_bytes(0))[8:]
    before = held(ctx)
    for tokens, message in (([5, 10**6], "token 1 is 1000000, the vocabulary has"), ([-1], "token 0 is -1")):
        (tmp_path / "q").write_bytes(sequence_head(np.array(tokens, np.int32)) + state)
        with pytest.raises(StateError, match=message):
            ctx.load_sequence(tmp_path / "q", 1)
    arch = ctx.model.hparams.architecture
    whole = bytes(ctx.state_bytes())[4 + len(arch) :]
    (tmp_path / "n").write_bytes(session_head(np.arange(300, dtype=np.int32), arch) + whole)
    with pytest.raises(StateError, match="300 tokens, and the context has room for 256"):
        ctx.load_session(tmp_path / "n")
    assert held(ctx) == before


def test_a_warning_made_an_error_leaves_all_as_it_was(ctx: pykv.Context, tmp_path: Path) -> None:
    told(ctx)
    with pytest.warns(RuntimeWarning):
        ctx.save_sequence(tmp_path / "q", 0, TOKENS[:3])
    before = held(ctx), (tmp_path / "q").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (lambda: ctx.save_sequence(tmp_path / "q", 0, [1]), lambda: ctx.load_sequence(tmp_path / "q", 1)):
            with pytest.raises(RuntimeWarning):
                call()
    assert (held(ctx), (tmp_path / "q").read_bytes()) == before
