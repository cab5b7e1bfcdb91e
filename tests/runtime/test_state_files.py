"""Files of saved states as a newcomer meets them: what was given comes back, and every refusal says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saved_contexts import PARAMS, TOKENS
from support.tiny_gguf import TinyModel

import pykv
from pykv.errors import ParamError, StateError
from pykv.runtime.states import convert
from pykv.state_format import side_car

TINY = TinyModel(seed=24, n_embd=64, n_head=2, n_head_kv=1, n_ff=64)
EACH = pytest.mark.parametrize("kind", ["session", "sequence"])


@pytest.fixture
def model(write_tiny: Callable[[TinyModel], Path]) -> Iterator[pykv.Model]:
    with pykv.Model.load(write_tiny(TINY)) as loaded:
        yield loaded


@pytest.fixture
def ctx(model: pykv.Model) -> Iterator[pykv.Context]:
    """Eight tokens in sequences 0 and 1."""
    with model.context(**PARAMS) as context:
        for s in (0, 1):
            context.decode(pykv.Batch(TOKENS, seq_id=[s] * len(TOKENS)))
        yield context


def save(ctx: pykv.Context, kind: str, path: Any, **remarks: Any) -> int:
    return (
        ctx.save_session(path, TOKENS, **remarks)
        if kind == "session"
        else ctx.save_sequence(path, 0, TOKENS, **remarks)
    )


def load(ctx: pykv.Context, kind: str, path: Any, **options: Any) -> list[int]:
    return ctx.load_session(path, **options) if kind == "session" else ctx.load_sequence(path, 0, **options)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


# what was given


@EACH
def test_what_was_saved_beside_a_state_could_not_be_read_back(kind: str, ctx: pykv.Context, tmp_path: Path) -> None:
    early = bytes(ctx.state_bytes(0))
    save(ctx, kind, tmp_path / "a", extra={"sampler": {"seed": 3}}, attachments={"early": early, "row": np.arange(3)})
    with pykv.open_state(tmp_path / "a") as saved:
        assert (saved.tokens, saved.extra) == (TOKENS, {"sampler": {"seed": 3}})
        assert list(saved.attachments) == ["early", "row"]
        early_again = saved.attachments["early"]
        assert isinstance(early_again.obj, type(saved.data))  # mapped, not copied
        assert early_again.readonly
        assert np.frombuffer(saved.attachments["row"], np.int64).tolist() == [0, 1, 2]
        saved.verify()
    assert early_again == early  # a view outlives the with statement
    ctx.memory.seq_rm(0)
    ctx.load_state_bytes(early_again, 0)
    assert bytes(ctx.state_bytes(0)) == early


@EACH
def test_a_changed_attachment_is_noticed_when_the_file_is_opened(kind: str, ctx: pykv.Context, tmp_path: Path) -> None:
    save(ctx, kind, tmp_path / "a", attachments={"early": b"abcdefgh" * 9})
    path = side_car(tmp_path / "a") if kind == "session" else tmp_path / "a"
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abcdefgi", 1))
    with pytest.raises(StateError, match=f"{path}.*checksum"), pykv.open_state(tmp_path / "a"):
        pass


def test_a_state_without_notes_gives_none_back(ctx: pykv.Context, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(ctx.state_bytes(1))
    with pykv.open_state(tmp_path / "a") as saved:
        assert (saved.tokens, saved.extra, saved.attachments, saved.notes) == ([], {}, {}, None)


BAD_REMARKS: list[tuple[dict[str, Any], str]] = [
    ({"attachments": {"a": "text"}}, r"attachments\['a'\]='text': must be bytes"),
    ({"attachments": {"a": 5}}, r"attachments\['a'\]=5"),
    ({"attachments": {"a": None}}, r"attachments\['a'\]=None"),
    ({"attachments": {"a": np.zeros((4, 4))[:, ::2]}}, r"attachments\['a'\]: must be bytes that lie together"),
    ({"attachments": {5: b"x"}}, "attachments: the name 5 must be a text"),
    ({"attachments": {"previous": b"x"}}, r"attachments\['previous'\]: pykv uses this name"),
    ({"attachments": [b"x"]}, "attachments=.* must be a dict"),
    ({"extra": [1]}, r"extra=\[1\]: must be a dict"),
    ({"extra": "x"}, "extra='x': must be a dict"),
    ({"extra": {5: 1}}, "extra: the name 5"),
    ({"extra": {"a": float("nan")}}, "extra=.* JSON"),
    ({"extra": {"a": {1, 2}}}, "extra=.* JSON"),
]


@EACH
def test_attachments_of_the_wrong_type_ended_in_a_bare_type_error(kind: str, ctx: pykv.Context, tmp_path: Path) -> None:
    for remarks, message in BAD_REMARKS:
        with pytest.raises(ParamError, match=message):
            save(ctx, kind, tmp_path / "a", **remarks)
    assert names(tmp_path) == []


# what does not fit


@EACH
@pytest.mark.parametrize("change", [
    {"type_k": "q8_0"}, {"type_v": "f16"}, {"flash_attn": False}, {"kv_unified": False},
    {"type_k": "q8_0", "type_v": "q8_0", "kv_unified": False},
], ids=str)  # fmt: skip
def test_a_strict_refusal_did_not_say_that_it_can_be_converted(
    kind: str, change: dict[str, Any], model: pykv.Model, ctx: pykv.Context, tmp_path: Path, recwarn: Any
) -> None:
    if (kind, change) == ("sequence", {"kv_unified": False}):
        return  # there is nothing to convert
    save(ctx, kind, tmp_path / "a")
    with model.context(**PARAMS | change) as other:
        with pytest.raises(StateError, match=rf"^{tmp_path / 'a'}: .*expected .*; strict=False converts it"):
            load(other, kind, tmp_path / "a")
        assert load(other, kind, tmp_path / "a", strict=False) == TOKENS


@pytest.mark.parametrize("change", [{"n_seq_max": 4, "kv_unified": False}, {"kv_unified": True}], ids=str)
@pytest.mark.filterwarnings("error")
def test_a_sequence_was_refused_by_contexts_of_more_streams(
    change: dict[str, Any], model: pykv.Model, tmp_path: Path
) -> None:
    with model.context(**PARAMS | {"n_seq_max": 2, "kv_unified": False}) as one:
        one.decode(pykv.Batch(TOKENS, seq_id=[1] * len(TOKENS)))
        one.save_sequence(tmp_path / "a", 1, TOKENS)
        with model.context(**PARAMS | change) as other:
            assert other.load_sequence(tmp_path / "a", 2) == TOKENS
            assert np.array_equal(other.memory.k(0, 2), one.memory.k(0, 1))
            other.load_state_bytes(one.state_bytes(1), 0)
            assert np.array_equal(other.memory.v(1, 0), one.memory.v(1, 1))


def test_a_session_of_too_many_sequences_says_how_many_and_how_to_take_one(
    model: pykv.Model, ctx: pykv.Context, tmp_path: Path
) -> None:
    ctx.save_session(tmp_path / "a")
    with model.context(**PARAMS | {"n_seq_max": 1}) as other:
        for strict in (True, False):
            with pytest.raises(StateError, match=r"n_seq_max=2 takes it, and `pykv state convert .* --to sequence"):
                other.load_session(tmp_path / "a", strict=strict)
        convert(tmp_path / "a", tmp_path / "one", to="sequence", seq_id=1)
        other.load_sequence(tmp_path / "one", 0)


def test_a_state_of_another_shape_says_that_it_is_whole(
    ctx: pykv.Context, write_tiny: Callable[[TinyModel], Path]
) -> None:
    wide = TinyModel(seed=25, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, head_dim=64)
    with pykv.Model.load(write_tiny(wide)) as model, model.context(**PARAMS) as other:
        for strict in (True, False):
            with pytest.raises(StateError, match="the state is whole, and not of a context like this one"):
                other.load_state_bytes(ctx.state_bytes(0), 0, strict=strict)


def test_a_load_of_another_kind_of_state_names_the_call_for_it(ctx: pykv.Context, tmp_path: Path) -> None:
    made = {
        "load_session(path)": ctx.save_session,
        "load_sequence(path, seq_id)": lambda path: ctx.save_sequence(path, 0),
        "load_state_bytes(data)": lambda path: path.write_bytes(ctx.state_bytes()),
        "load_state_bytes(data, seq_id)": lambda path: path.write_bytes(ctx.state_bytes(0)),
    }
    for i, (call, make) in enumerate(made.items()):
        make(path := tmp_path / str(i))
        refused = []
        for use in (
            lambda path=path: ctx.load_session(path),
            lambda path=path: ctx.load_sequence(path, 0),
            lambda path=path: ctx.load_state_bytes(path.read_bytes()),
            lambda path=path: ctx.load_state_bytes(path.read_bytes(), 0),
        ):
            try:
                use()
            except StateError as error:
                refused.append(str(error))
        assert len(refused) == 3
        for message in refused:
            assert f": {call} loads one" in message
        assert str(path) in refused[0]


@pytest.mark.parametrize("data", [5, "text", None, np.zeros((4, 4))[:, ::2]], ids=lambda one: type(one).__name__)
def test_bytes_that_are_none_are_named(data: Any, ctx: pykv.Context) -> None:
    with pytest.raises(ParamError, match="data: must be bytes"):
        ctx.load_state_bytes(data, 0)


def test_a_warning_pointed_into_pykv(model: pykv.Model, ctx: pykv.Context, tmp_path: Path) -> None:
    ctx.save_session(tmp_path / "a")
    side_car(tmp_path / "a").unlink()
    with model.context(**PARAMS | {"type_k": "f16"}) as other:
        for use in (
            lambda: ctx.load_session(tmp_path / "a"),
            lambda: other.load_state_bytes(ctx.state_bytes(0), 0, strict=False),
        ):
            with pytest.warns(RuntimeWarning) as heard:
                use()
            assert [one.filename for one in heard] == [__file__]


# what is damaged


def test_a_damaged_session_advised_to_remove_its_notes(ctx: pykv.Context, tmp_path: Path) -> None:
    path = tmp_path / "a"
    ctx.save_session(path, TOKENS)
    good = path.read_bytes()
    for at in (13, len(good) - 1):  # a token, and the last row
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(StateError, match=f"{path}.* damaged.*take another copy") as caught:
            ctx.load_session(path)
        assert "remove" not in str(caught.value)
    path.write_bytes(good[:-500])
    with pytest.raises(StateError, match=f"expected up to byte {len(good)}, found {len(good) - 500} bytes"):
        ctx.load_session(path)


@pytest.mark.parametrize("content", [b"", b"garbage", "cut", "more"])
def test_a_side_car_that_is_none_is_named(content: bytes | str, ctx: pykv.Context, tmp_path: Path) -> None:
    ctx.save_session(tmp_path / "a", TOKENS)
    beside = side_car(tmp_path / "a")
    good = beside.read_bytes()
    beside.write_bytes(content if isinstance(content, bytes) else {"cut": good[:-9], "more": b"x" + good}[content])
    with pytest.raises(StateError, match=f"^{beside}: the notes on the session beside them are damaged: ") as caught:
        ctx.load_session(tmp_path / "a")
    assert str(caught.value).count(str(beside)) == 1


def test_notes_that_belong_to_another_session_are_recognised(ctx: pykv.Context, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    ctx.save_session(a, TOKENS)
    ctx.save_session(b, TOKENS[:3])
    side_car(b).replace(side_car(a))
    message = (
        f"^{side_car(a)}: notes on another session than the one beside it: on {b.stat().st_size} bytes, and it has "
    )
    with pytest.raises(StateError, match=message + str(a.stat().st_size)):
        ctx.load_session(a)


def test_a_cut_file_said_where_twice_and_guessed(ctx: pykv.Context, tmp_path: Path) -> None:
    """Where only the notes were cut, the state was taken for damaged."""
    path = tmp_path / "a"
    ctx.save_sequence(path, 0, TOKENS)
    good = path.read_bytes()
    state = 44 + memoryview(ctx.state_bytes(0)).nbytes - 8  # the head of the file, then all behind that of the bytes
    for n, message in ((state + 100, "100 more bytes.*nor notes that are whole"), (state - 100, "damaged or cut off")):
        path.write_bytes(good[:n])
        for use in (lambda: ctx.load_sequence(path, 0), lambda: convert(path, tmp_path / "b")):
            with pytest.raises(StateError, match=f"^{path}: ") as caught:
                use()
            assert str(caught.value).count("at byte") <= 1
        with pytest.raises(StateError, match=message):
            ctx.load_sequence(path, 0)
    path.write_bytes(good[: state + 100])
    with pytest.raises(StateError, match=f"up to byte {state}, and behind them 100 bytes that are none"):
        convert(path, tmp_path / "b")


# what cannot be written


PATHS: list[tuple[Any, type[Exception], str]] = [
    ("", ParamError, "path='' is empty"),
    ("a\0b", ParamError, "NUL"),
    ("sub/", ParamError, "path='sub/' is a folder's"),
    ("\ud800", ParamError, "path="),
    (5, ParamError, "path=5 must be the path of a file"),
    (None, ParamError, "path=None must be the path of a file"),
    ("sub", IsADirectoryError, "sub"),
    ("no/where", FileNotFoundError, "no/where"),
    ("file/x", NotADirectoryError, "file/x"),
]


@EACH
def test_paths_that_no_file_has(kind: str, ctx: pykv.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder got a side-car; an empty path was called a folder, and told that it was as before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").write_text("x")
    for path, error, message in PATHS:
        for use in (save, load):
            with pytest.raises(error, match=message) as caught:
                use(ctx, kind, path)
            assert "0 bytes" not in str(caught.value)
        with pytest.raises(error, match=message), pykv.open_state(path):
            pass
    with pytest.raises(FileNotFoundError, match=r"no is no folder; nothing was written: 'no/where'"):
        save(ctx, kind, "no/where")
    assert names(tmp_path) == ["file", "sub"]
    assert names(tmp_path / "sub") == []


def test_a_conversion_onto_a_folder_left_notes_behind(ctx: pykv.Context, tmp_path: Path) -> None:
    ctx.save_session(tmp_path / "a")
    (tmp_path / "sub").mkdir()
    with pytest.raises(IsADirectoryError):
        convert(tmp_path / "a", tmp_path / "sub")
    assert names(tmp_path) == ["a", "a.pykv", "sub"]


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
@pytest.mark.parametrize("nth", range(3))
def test_a_save_that_fails_leaves_what_was_there(
    broken: str, nth: int, ctx: pykv.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session and its notes are complete before either is in its place; if only the notes are, they tell of both."""
    old, real = tmp_path / "old", getattr(os, broken)
    ctx.save_session(old, TOKENS, extra={"turn": 1})
    before, state = old.read_bytes(), bytes(ctx.state_bytes())
    ctx.decode(pykv.Batch([4]))
    for path in (old, tmp_path / "new"):
        left = iter(range(nth))

        def fail(*args: Any, left: Any = left, **keywords: Any) -> Any:
            if next(left, None) is None:
                raise OSError(errno.EIO, "broken")
            return real(*args, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(os, broken, fail)
            try:
                ctx.save_session(path, [*TOKENS, 4], extra={"turn": 2})
            except OSError:
                assert names(tmp_path) == ["old", "old.pykv"]
                assert old.read_bytes() == before
                with pykv.open_state(old) as saved:
                    assert (saved.extra, list(saved.attachments)) == ({"turn": 1}, [])
            else:
                assert nth == 2, "a save writes, waits for and moves two files"
                return
    assert ctx.load_session(old) == TOKENS
    assert bytes(ctx.state_bytes()) == state


def test_two_crashes_in_a_row_lost_the_notes_of_the_session(ctx: pykv.Context, tmp_path: Path) -> None:
    """Both after the notes were in place: those on the session that was still there were two back, and dropped."""
    path = tmp_path / "a"
    ctx.save_session(path, TOKENS, extra={"turn": 1})
    first = path.read_bytes()
    for turn in (2, 3):
        ctx.decode(pykv.Batch([4]))
        ctx.save_session(path, TOKENS, extra={"turn": turn})
        path.write_bytes(first)
    with pykv.open_state(path) as saved:
        assert saved.extra == {"turn": 1}
        saved.verify()


def test_sessions_of_one_length_and_one_head_have_their_own_notes(ctx: pykv.Context, tmp_path: Path) -> None:
    path = tmp_path / "a"
    ctx.save_session(path, extra={"turn": 1})
    first = path.read_bytes()
    ctx.memory.seq_rm(0)
    ctx.decode(pykv.Batch(TOKENS[::-1], seq_id=[0] * len(TOKENS)))
    ctx.save_session(path, extra={"turn": 2})
    second = path.read_bytes()
    assert len(first) == len(second)
    for data, turn in ((first, 1), (second, 2)):
        path.write_bytes(data)
        with pykv.open_state(path) as saved:
            assert saved.extra == {"turn": turn}


def test_a_session_saved_through_a_link_has_its_notes_where_it_lies(ctx: pykv.Context, tmp_path: Path) -> None:
    """They were beside the link, and the old ones beside the session: it was refused."""
    (tmp_path / "link").symlink_to("real")
    ctx.save_session(tmp_path / "real", TOKENS)
    ctx.decode(pykv.Batch([4]))
    ctx.save_session(tmp_path / "link", TOKENS)
    assert names(tmp_path) == ["link", "real", "real.pykv"]
    for name in ("link", "real"):
        assert ctx.load_session(tmp_path / name) == TOKENS
