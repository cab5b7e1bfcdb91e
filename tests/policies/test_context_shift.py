"""Which tokens give way when a sequence is full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apply_plans import TokenList, apply_step

from pykv.errors import ContextLengthExceeded, ParamError
from pykv.policies import ContextShift, kept_prompt, plan_shift


@pytest.mark.parametrize(
    ("n_ctx", "n_past", "n_keep", "n_discard", "removed", "moved", "n_left"),
    [
        (256, 255, 1, 0, (1, 128), (128, 255), 128),
        (4096, 4095, 1001, 0, (1001, 2548), (2548, 4095), 2548),
        (2048, 2047, 25, 512, (25, 537), (537, 2047), 1535),
        (512, 511, kept_prompt(511, 512), 0, (508, 509), (509, 511), 510),
        (512, 511, kept_prompt(511, 512), 1000, (508, 510), (510, 511), 509),
    ],
)
def test_worked_examples(n_ctx, n_past, n_keep, n_discard, removed, moved, n_left) -> None:
    """The table of session.md section 2.4, its start tokens counted by the caller."""
    shift = plan_shift(n_past, n_ctx, n_keep, n_discard)
    assert (shift.removed, shift.moved, shift.n_left) == (removed, moved, n_left)
    assert shift.delta == -(n_past - n_left)


def test_who_survives_a_first_and_a_second_shift() -> None:
    """Of a prompt of 226 in 256, the start token and 128 to 254; then nothing of the prompt but the start token."""
    held = TokenList(list(range(255)))
    apply_step(held, plan_shift(255, 256, 1))
    assert held.tokens == [0, *range(128, 255)]
    held.rows += [[p, p + 127] for p in range(128, 255)]
    apply_step(held, plan_shift(255, 256, 1))
    assert held.tokens == [0, *range(255, 382)]
    assert not set(held.tokens[1:]) & set(range(226))


def test_a_shift_is_data() -> None:
    assert plan_shift(16, 16, 4) == ContextShift(n_past=16, n_keep=4, n_discard=6)


# case A05, ggml-org/llama.cpp#3969


def test_generation_without_limit_shifted_for_ever() -> None:
    """Capacity 16, 4 kept: one shift each six tokens."""
    n_past, shifts = 4, []
    for i in range(100):
        if n_past == 16:
            n_past = plan_shift(n_past, 16, 4).n_left
            shifts.append(i)
        n_past += 1
    assert shifts == list(range(12, 100, 6))
    assert (len(shifts), n_past) == (15, 14)


@pytest.mark.parametrize("n_discard", [0, 1, 1000])
@pytest.mark.parametrize("n_keep", [15, 16])
def test_nothing_to_discard_shifted_for_ever(n_keep: int, n_discard: int) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"cannot shift: of 16 tokens .* of 16, {n_keep} are to be kept"):
        plan_shift(16, 16, n_keep, n_discard)


@pytest.mark.parametrize(("n_past", "n_keep"), [(0, 0), (1, 0), (2, 1), (3, 10)])
def test_a_sequence_too_short_to_lose_anything(n_past: int, n_keep: int) -> None:
    with pytest.raises(ContextLengthExceeded, match="cannot shift"):
        plan_shift(n_past, 16, n_keep)


def test_a_shift_for_every_token_can_be_refused() -> None:
    """Example 4: each shift frees one token."""
    n_keep = kept_prompt(511, 512)
    with pytest.raises(ContextLengthExceeded, match="1 could be dropped, at least 16 should"):
        plan_shift(511, 512, n_keep, n_discard_min=16)
    assert plan_shift(511, 512, 100, n_discard_min=16).n_discard == 205


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((16, 16, 20), "n_keep = 20"),
        ((16, 16, -1), "n_keep = -1"),
        ((17, 16, 4), "n_past = 17"),
        ((-1, 16, 4), "n_past = -1"),
        ((0, 0, 0), "n_ctx = 0"),
        ((16, 16, 4, -1), "n_discard = -1"),
        ((16, 16, 2.0), "n_keep = 2.0"),
        ((16, 16, True), "n_keep = True"),
    ],
)
def test_numbers_that_make_no_sense(args: tuple, named: str) -> None:
    with pytest.raises(ParamError, match=named):
        plan_shift(*args)


def test_a_prompt_to_be_kept_leaves_room() -> None:
    assert [kept_prompt(n, 16) for n in (0, 1, 11, 12, 13, 16, 1000)] == [0, 1, 11, 12, 12, 12, 12]
    assert plan_shift(16, 16, kept_prompt(1000, 16)).n_discard == 2
    assert plan_shift(4, 5, kept_prompt(4, 5)).n_discard == 1
    for n_ctx in (0, 4, 1.5):
        with pytest.raises(ParamError, match="n_ctx"):
            kept_prompt(3, n_ctx)
    with pytest.raises(ParamError, match="n_prompt = -1"):
        kept_prompt(-1, 16)


@given(st.data())
def test_a_shift_keeps_the_front_and_the_end_and_makes_room(data: st.DataObject) -> None:
    n_ctx = data.draw(st.integers(1, 60))
    n_past = data.draw(st.integers(0, n_ctx))
    n_keep = data.draw(st.integers(0, n_ctx))
    n_discard = data.draw(st.integers(0, 70))
    held = TokenList(list(range(n_past)))
    try:
        shift = plan_shift(n_past, n_ctx, n_keep, n_discard)
    except ContextLengthExceeded:
        assert n_past - n_keep < 2, "one token to drop and one to stay are enough"
        return
    apply_step(held, shift)
    wanted = n_discard or (n_past - n_keep) // 2
    gone = min(wanted, n_past - n_keep - 1)
    assert gone >= 1
    assert held.tokens == [*range(n_keep), *range(n_keep + gone, n_past)]
    assert len(held.tokens) == shift.n_left < n_ctx
