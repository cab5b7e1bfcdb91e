"""Byte-level BPE against ids worked out by hand and against the naive tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.naive_tokenizer import bpe_ids, gpt2_words
from support.tiny_vocab import CONTROL, NORMAL, USER_DEFINED, bpe_metadata, byte_chars

from pykv.errors import TokenizerError
from pykv.runtime.tokenizer import Tokenizer

MERGES = [
    "h e", "l l", "o w", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "rl d", "Ġwo rld", "Ġ Ġ", "1 2", "12 3", "Ċ Ċ", "a a",
    "aa a", "Ã ©", "' s", "Ġ he", "Ġhe ll", "ã ģ",
]  # fmt: skip
SPECIALS = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<|im": USER_DEFINED, "[tool]": USER_DEFINED}
ALPHABET = "helo wrd123a'sSéあ中\n\t \u3000!?-\u0301\u200dĠ🦩ß٣½\u00ad\x04"


def tokenizer(pre: str = "gpt-2", **extra: object) -> Tokenizer:
    return Tokenizer.from_metadata(bpe_metadata(MERGES, pre=pre, specials=SPECIALS, **extra))


def ids_of(tokens: list[str], of: Tokenizer) -> list[int]:
    table = {of.token_text(token): token for token in range(of.n_vocab)}
    return [table[text] for text in tokens]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("hello", ["hello"]),
        ("hello world", ["hello", "Ġworld"]),
        (" hello", ["Ġ", "hello"]),  # "Ġ he" comes too late: "he ll" has the lower rank
        (" he", ["Ġhe"]),
        ("he said", ["he", "Ġ", "s", "a", "i", "d"]),
        ("hell's", ["hell", "'s"]),
        ("   x", ["ĠĠ", "Ġ", "x"]),  # the last space belongs to the word
        ("  ", ["ĠĠ"]),
        ("\n\n", ["ĊĊ"]),
        ("aaaa", ["aa", "aa"]),  # leftmost pairs first, and "aa a" needs a single a beside aa
        ("aaa", ["aaa"]),
        ("é", ["Ã©"]),
        ("1234", ["123", "4"]),
    ],
)
def test_known_ids(text, tokens):
    of = tokenizer()
    assert of.encode(text) == ids_of(tokens, of)


def test_smollm_takes_digits_one_by_one():
    of = tokenizer("smollm")
    assert of.encode("a123") == ids_of(["a", "1", "2", "3"], of)


def test_a_word_that_is_a_token_ignores_the_merges_in_llama3():
    of = Tokenizer.from_metadata(bpe_metadata(["a b"], pre="llama-bpe", specials={"abc": NORMAL}))
    assert of.encode("abc") == ids_of(["abc"], of)
    of = Tokenizer.from_metadata(bpe_metadata(["a b"], pre="dbrx", specials={"abc": NORMAL}))
    assert of.encode("abc") == ids_of(["ab", "c"], of)  # the same words, but merges decide


@settings(deadline=None)
@given(st.text(alphabet=ALPHABET, max_size=40))
def test_equals_the_naive_tokenizer(text):
    of = _shared()
    ids = {of.token_text(token): token for token in range(of.n_vocab)}
    assert of.encode(text) == bpe_ids(text, gpt2_words(text), ids, MERGES)


@settings(deadline=None)
@given(st.text(alphabet=ALPHABET, max_size=40))
def test_bytes_without_a_token_are_left_out_and_part_their_neighbours(text):
    of = _gappy()
    ids = {of.token_text(token): token for token in range(of.n_vocab)}
    assert of.encode(text) == bpe_ids(text, gpt2_words(text), ids, MERGES)


def test_neighbours_of_a_byte_without_a_token_do_not_merge():
    of = _gappy()
    assert of.encode("--\x04--") == ids_of(["-", "-", "-", "-"], of)
    assert of.encode("!\x04!") == ids_of(["!", "!"], of)


def test_a_merge_of_something_that_is_no_token_falls_back_to_its_ascii_characters():
    meta = bpe_metadata(["x y", "xy z", "Ġ q"])
    lost = {"xy", "xyz", "Ġq"}
    meta["tokenizer.ggml.tokens"] = [text for text in meta["tokenizer.ggml.tokens"] if text not in lost]
    of = Tokenizer.from_metadata(meta)
    assert of.encode("xyz") == ids_of(["x", "y", "z"], of)
    assert of.encode("a q") == ids_of(["a", "q"], of)  # the stand-in for a space is not ASCII


@pytest.mark.parametrize("merges", [["Ġ e"], ["Ġ e", "Ġe y"], ["é é", "q Ġé"], ["x y"]])
def test_a_merge_into_something_longer_than_every_token_panicked(merges):
    meta = {**bpe_metadata([]), "tokenizer.ggml.merges": merges}
    of = Tokenizer.from_metadata(meta)
    ids = {of.token_text(token): token for token in range(of.n_vocab)}
    for text in ("hello", "a eye e", "é éé", " e", "xy"):
        assert of.encode(text) == bpe_ids(text, gpt2_words(text), ids, merges)


def test_of_equal_merges_the_first_counts():
    meta = bpe_metadata(["b c", "a b", "b c"])
    of = Tokenizer.from_metadata(meta)
    assert of.encode("abc") == ids_of(["a", "bc"], of)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xe3\x81", "\ufffd\ufffd"),
        (b"\xc3(", "\ufffd("),
        (b"\xc1\x81", "A"),  # overlong forms are read
        (b"\xf5\x80\x80\x80", "\ufffd\ufffd\ufffd\ufffd"),
        (b"\xf8\x88", "\ufffd\ufffd"),
    ],
)
def test_invalid_bytes_become_replacement_characters(raw, text):
    of = tokenizer()
    assert of.encode(raw) == of.encode(text)


def test_a_surrogate_in_utf8_keeps_its_three_bytes():
    of = tokenizer()
    chars = byte_chars()
    expected = ids_of(["h", "i", *(chars[byte] for byte in b"\xed\xa0\x80"), "!"], of)
    assert of.encode(b"hi\xed\xa0\x80!") == expected
    assert of.encode("hi\ud800!") == expected


def test_special_tokens_are_found_longest_first():
    of = tokenizer()
    assert of.encode("<|im_start|>hello<|im_end|>") == ids_of(["<|im_start|>", "hello", "<|im_end|>"], of)
    assert of.encode("<|im<|im_end|>_start|>") == ids_of(["<|im", "<|im_end|>", *"_start|>"], of)


def test_without_parse_special_control_tokens_are_text_and_user_defined_ones_are_not():
    of = tokenizer()
    assert of.encode("<|im_end|>[tool]", parse_special=False) == ids_of(["<|im", *"_end|>", "[tool]"], of)


def test_unknown_pre_tokenizer_names_the_known_ones():
    with pytest.raises(TokenizerError, match=r"'tokenizer\.ggml\.pre' is 'nonsense'; known: .*llama-bpe.*smollm"):
        tokenizer("nonsense")


def test_a_merge_that_is_no_pair_is_never_used():
    of = Tokenizer.from_metadata({**bpe_metadata([]), "tokenizer.ggml.merges": ["ab"]})
    assert of.encode("ab") == ids_of(["a", "b"], of)


def test_missing_merges_are_an_error():
    meta = bpe_metadata([])
    del meta["tokenizer.ggml.merges"]
    with pytest.raises(TokenizerError, match=r"lacks 'tokenizer\.ggml\.merges'"):
        Tokenizer.from_metadata(meta)


_MADE: dict[str, Tokenizer] = {}


def _shared() -> Tokenizer:
    return _MADE.setdefault("whole", Tokenizer.from_metadata(bpe_metadata(MERGES)))


def _gappy() -> Tokenizer:
    """A vocabulary without tokens for the bytes 04, E3 and AD, though merges speak of them."""
    if "gappy" not in _MADE:
        meta = bpe_metadata([*MERGES, "- -", "! !"])
        chars = byte_chars()
        lost = {chars[0x04], chars[0xE3], chars[0xAD]}
        meta["tokenizer.ggml.tokens"] = [text for text in meta["tokenizer.ggml.tokens"] if text not in lost]
        del meta["tokenizer.ggml.token_type"]
        meta["tokenizer.ggml.merges"] = MERGES
        _MADE["gappy"] = Tokenizer.from_metadata(meta)
    return _MADE["gappy"]
