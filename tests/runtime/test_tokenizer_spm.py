"""SentencePiece's BPE against ids worked out by hand and against the naive tokenizer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.naive_tokenizer import partition, spm_ids
from support.tiny_vocab import CONTROL, USER_DEFINED, spm_metadata

from pykv.errors import TokenizerError
from pykv.runtime.tokenizer import Tokenizer

SCORES = {
    "▁": -1.0, "h": -2.0, "e": -3.0, "l": -4.0, "o": -5.0,
    "he": -6.0, "ll": -7.0, "hell": -9.0, "▁he": -8.0, "lo": -6.5,
    "▁hello": -12.0, "hello": -11.0, "a": -13.0, "aa": -14.0, "aaa": -14.0,
    "b": -15.0, "ab": -14.0, "ba": -14.0, "é": -16.0,
    "▁▁": -17.0,
    "a▁b": -18.0, "a▁": -13.5, "\n": -19.0, "中": -20.0, "中中": -21.0, "▁a": float("-inf"),
}  # fmt: skip
SPECIALS = {"<turn>": CONTROL, "<turn": USER_DEFINED, "  ": USER_DEFINED, "\n\n": USER_DEFINED}
ALPHABET = "helo ab\n▁é中x🦩>"


@cache
def tokenizer(*, add_space_prefix: bool = False, add_bos: bool = False) -> Tokenizer:
    flags = {"add_space_prefix": add_space_prefix, "add_bos_token": add_bos}
    return Tokenizer.from_metadata(spm_metadata(SCORES, specials=SPECIALS, **flags))


def ids_of(tokens: list[str], of: Tokenizer) -> list[int]:
    table = {of.token_text(token): token for token in range(of.n_vocab)}
    return [table[text] for text in tokens]


def naive_ids(raw: bytes, of: Tokenizer, *, parse_special: bool = True) -> list[int]:
    table = {of.token_text(token).encode(): token for token in range(of.n_vocab)}
    scores = dict.fromkeys(table, 0.0) | {text.encode(): max(score, -3e38) for text, score in SCORES.items()}
    specials = [(text.encode(), table[text.encode()]) for text in SPECIALS]
    if parse_special:
        specials += [(text, table[text]) for text in (b"<unk>", b"<s>", b"</s>")]
    else:
        specials = [special for special in specials if special[0] != b"<turn>"]
    ids: list[int] = []
    for fragment in partition(raw, specials):
        ids += [fragment] if isinstance(fragment, int) else spm_ids(fragment, table, scores)
    return ids


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("hello", ["he", "l", "lo"]),  # lo beats ll, so "hell" and "hello" are never reached
        (" hello", ["▁he", "l", "lo"]),
        ("hell", ["hell"]),
        ("ello", ["e", "l", "lo"]),
        ("aba", ["ab", "a"]),  # equal scores: the leftmost pair
        ("aaa", ["aaa"]),
        ("x", ["<0x78>"]),
        ("🦩", ["<0xF0>", "<0x9F>", "<0xA6>", "<0xA9>"]),
        ("a b", ["a▁b"]),  # a token across the space
        ("h\n\nh", ["h", "\n\n", "h"]),
        ("h   h", ["h", "  ", "▁", "h"]),
    ],
)
def test_known_ids(text, tokens):
    of = tokenizer()
    assert of.encode(text) == ids_of(tokens, of)


def test_a_space_is_put_before_text_at_the_start_and_after_special_tokens():
    of = tokenizer(add_space_prefix=True, add_bos=True)
    expected = ids_of(["<s>", "▁he", "<turn>", "▁he", "b"], of)
    assert of.encode("he<turn>heb") == expected
    assert of.encode("he<turn>heb", add_bos=False) == expected[1:]


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=ALPHABET, max_size=30))
@example("a" * 70 + "b")
def test_equals_the_naive_tokenizer(text):
    of = tokenizer()
    assert of.encode(text) == naive_ids(text.encode(), of)


@settings(deadline=None)
@given(st.text(alphabet="ab▁ 中", min_size=60, max_size=120))
def test_long_texts_without_a_cut_equal_the_naive_tokenizer(text):
    of = tokenizer()
    assert of.encode(text) == naive_ids(text.encode(), of)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<turn>", "<turn", "<s>", "</s>", "  ", "\n\n", "\n", " ", "he", ">", "<"]), max_size=9)
)
@pytest.mark.parametrize("parse_special", [True, False])
def test_special_tokens_equal_the_naive_partition(parse_special, parts):
    of, text = tokenizer(), "".join(parts)
    expected = naive_ids(text.encode(), of, parse_special=parse_special)
    assert of.encode(text, parse_special=parse_special) == expected


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([b"he", b" ", b"\xe4\xb8\xad", b"\xe4\xb8", b"\xe4", b"\xff", b"\xc3", b"\x80", b"<turn>"])
    )
)
def test_invalid_bytes_equal_the_naive_tokenizer(parts):
    of, raw = tokenizer(), b"".join(parts)
    assert of.encode(raw) == naive_ids(raw, of)


def test_a_lead_byte_swallows_the_bytes_that_it_promises():
    of = tokenizer()
    assert of.encode(b"\xe4hehe") == ids_of(["<0xE4>", "<0x68>", "<0x65>", "he"], of)


def test_a_vocabulary_without_byte_tokens_names_the_byte():
    meta = spm_metadata(SCORES)
    lost = [i for i, text in enumerate(meta["tokenizer.ggml.tokens"]) if text == "<0xF0>"]
    meta["tokenizer.ggml.tokens"][lost[0]] = "other"
    of = Tokenizer.from_metadata(meta)
    with pytest.raises(TokenizerError, match="no token for the byte 0xF0"):
        of.encode("🦩")


def test_the_file_asks_for_bos_and_eos():
    meta = spm_metadata(SCORES, add_eos_token=True, add_space_prefix=False)
    of = Tokenizer.from_metadata(meta)
    bos, eos, he = ids_of(["<s>", "</s>", "he"], of)
    assert of.encode("he") == [bos, he, eos]
    assert of.encode("") == [bos, eos]
    assert of.encode("he", add_bos=False) == [he]
    meta["tokenizer.ggml.add_bos_token"] = False
    of = Tokenizer.from_metadata(meta)
    assert of.encode("he") == [he, eos]
    assert of.encode("he", add_bos=True) == [bos, he, eos]


def test_nan_scores_are_an_error():
    meta = spm_metadata(SCORES)
    meta["tokenizer.ggml.scores"][7] = float("nan")
    with pytest.raises(TokenizerError, match="NaN for token 7"):
        Tokenizer.from_metadata(meta).encode("he")
