"""Which parts of a cached text a new prompt takes over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.apply_plans import TokenList, apply_reuse

from pykv.errors import ParamError
from pykv.policies import ChunkMove, ChunkReuse, plan_reuse


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text if letter not in " |"]


def naive_moves(cached: list[int], prompt: list[int], min_chunk: int) -> list[tuple[int, int, int]]:
    """Return (dst, src, length): two reading heads, as session.md section 3.2 tells it."""
    head_c = head_p = 0
    while head_c < min(len(cached), len(prompt)) and cached[head_c] == prompt[head_c]:
        head_c, head_p = head_c + 1, head_p + 1
    moves = []
    while min_chunk and head_c < len(cached) and head_p < len(prompt):
        m = 0
        while head_c + m < len(cached) and head_p + m < len(prompt) and cached[head_c + m] == prompt[head_p + m]:
            m += 1
        if m >= min_chunk:
            moves.append((head_p, head_c, m))
            head_c, head_p = head_c + m, head_p + m
        else:
            head_c += 1
    return moves


@pytest.mark.parametrize(
    ("cached", "prompt", "min_chunk", "n_prefix", "moves", "n_usable"),
    [
        ("aaaaccccbbbb", "aaaabbbb", 4, 4, [(4, 8, 4)], 7),
        ("aaaaccccbbbb", "aaaabbbb", 5, 4, [], 4),
        ("SSSS XXXX", "SSSS NN XXXX", 4, 4, [], 4),
        ("123456789ABCDEFG", "123 89A DEFG K", 3, 3, [(3, 7, 3), (6, 12, 4)], 10),
        ("123456789ABCDEFG", "123 89A DEFG K", 4, 3, [], 3),
        ("S u a b c v a b c d e", "S a b c d e", 3, 1, [(1, 2, 3)], 4),
    ],
)
def test_worked_examples(cached, prompt, min_chunk, n_prefix, moves, n_usable) -> None:
    """Those of session.md section 3.3."""
    reuse = plan_reuse(ids(cached), ids(prompt), min_chunk)
    assert reuse.n_prefix == n_prefix
    assert [(move.dst, move.src, move.length) for move in reuse.moves] == moves
    assert reuse.n_usable == n_usable


def test_who_lies_where_after_a_move() -> None:
    """The first example: positions 4 to 6 are those that were at 8 to 10; one is decoded again."""
    reuse = plan_reuse(ids("aaaaccccbbbb"), ids("aaaabbbb"), 4)
    held = TokenList(list(range(12)))
    apply_reuse(held, reuse)
    held.seq_rm(0, reuse.n_usable, -1)
    assert held.tokens == [0, 1, 2, 3, 8, 9, 10]


# case A03, ggml-org/llama.cpp#12160


def test_the_second_cut_removed_tokens_that_were_still_wanted() -> None:
    assert plan_reuse(ids("abcdefghj"), ids("abefhj"), 2) == ChunkReuse(
        n_prefix=2, moves=(ChunkMove(2, 4, 2), ChunkMove(4, 7, 2)), n_matched=6, n_usable=5
    )
    assert [move.delta for move in plan_reuse(ids("abcdefghj"), ids("abefhj"), 2).moves] == [-2, -3]
    blocked = plan_reuse(ids("ABCDEFGH"), ids("ABEFXGH"), 2)
    assert (blocked.moves, blocked.n_matched, blocked.n_usable) == ((ChunkMove(2, 4, 2),), 4, 4)
    held = TokenList(ids("ABCDEFGH"))
    apply_reuse(held, blocked)
    assert held.tokens == ids("ABEF")


# limits


@pytest.mark.parametrize(
    ("cached", "prompt", "n_matched", "n_usable"),
    [
        ("", "", 0, 0), ("", "ab", 0, 0), ("ab", "", 0, 0), ("a", "a", 1, 0), ("abc", "abc", 3, 2),
        ("abc", "abcde", 3, 3), ("abcd", "ab", 2, 1), ("xab", "ab", 2, 1), ("xyz", "ab", 0, 0),
    ],
)  # fmt: skip
def test_the_last_token_of_a_prompt_is_always_evaluated(cached, prompt, n_matched, n_usable) -> None:
    reuse = plan_reuse(ids(cached), ids(prompt), 1)
    assert (reuse.n_matched, reuse.n_usable) == (n_matched, n_usable)


def test_nothing_moves_unless_it_is_asked_for() -> None:
    assert plan_reuse(ids("xab"), ids("ab"), 0) == ChunkReuse(0, (), 0, 0)
    assert plan_reuse(ids("abxcd"), ids("abcd"), 0) == ChunkReuse(2, (), 2, 2)


def test_many_small_parts_of_a_long_text() -> None:
    """Every other token is gone; no part is searched for from the start again."""
    cached = np.arange(40_000)
    reuse = plan_reuse(cached, cached[1::2], 1)
    assert reuse.moves == tuple(ChunkMove(i, 2 * i + 1, 1) for i in range(20_000))


@pytest.mark.parametrize("kind", [tuple, list, np.array])
def test_token_ids_in_any_sequence(kind: type) -> None:
    assert plan_reuse(kind([1, 2, 3]), kind([2, 3]), 1).moves == (ChunkMove(0, 1, 2),)


@pytest.mark.parametrize(
    ("cached", "prompt", "min_chunk", "named"),
    [
        ([1.5], [1], 1, "cached"),
        ([1], ["a"], 1, "prompt"),
        ([[1]], [1], 1, "cached"),
        ([1], 1, 1, "prompt"),
        ([1], [1], -1, "min_chunk = -1"),
        ([1], [1], 1.0, "min_chunk = 1.0"),
    ],
)
def test_what_is_no_text(cached, prompt, min_chunk, named: str) -> None:
    with pytest.raises(ParamError, match=named):
        plan_reuse(cached, prompt, min_chunk)


# any text

FEW = st.lists(st.integers(0, 3), max_size=24)


@given(FEW, FEW, st.integers(0, 5))
@example(ids("abcdefghj"), ids("abefhj"), 2)
def test_what_is_left_reads_like_the_prompt(cached: list[int], prompt: list[int], min_chunk: int) -> None:
    reuse = plan_reuse(cached, prompt, min_chunk)
    assert [(move.dst, move.src, move.length) for move in reuse.moves] == naive_moves(cached, prompt, min_chunk)
    held = TokenList(cached)
    apply_reuse(held, reuse)
    assert held.tokens == prompt[: reuse.n_matched]
    assert reuse.n_usable == reuse.n_matched - (0 < len(prompt) == reuse.n_matched)
    assert all(move.delta < 0 for move in reuse.moves)


@given(st.lists(st.integers(0, 300), max_size=60), st.data())
def test_a_text_with_parts_cut_out_is_found_again(cached: list[int], data: st.DataObject) -> None:
    """Tokens that occur once: nothing but the cuts decides."""
    cached = list(dict.fromkeys(cached))
    kept = data.draw(st.lists(st.booleans(), min_size=len(cached), max_size=len(cached)))
    prompt = [token for token, keep in zip(cached, kept, strict=True) if keep]
    reuse = plan_reuse(cached, prompt, 1)
    assert reuse.n_matched == len(prompt)
    held = TokenList(cached)
    apply_reuse(held, reuse)
    assert held.tokens == prompt
