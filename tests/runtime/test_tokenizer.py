"""What the tokenizer says about a vocabulary, and the way back from ids to text."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, bpe_metadata, spm_metadata

from pykv.errors import TokenizerError
from pykv.runtime.tokenizer import StreamDecoder, Tokenizer

SPM_SCORES = {"▁": -1.0, "▁a": -2.0, "a": -3.0, "b": -4.0, "é": -5.0}


def bpe(specials: dict[str, int] | None = None, **extra: object) -> Tokenizer:
    return Tokenizer.from_metadata(bpe_metadata([], specials=specials, **extra))


@cache
def spm(*, add_space_prefix: bool = True) -> Tokenizer:
    specials = {"<tool>": USER_DEFINED, "<gone>": UNUSED}
    return Tokenizer.from_metadata(spm_metadata(SPM_SCORES, specials=specials, add_space_prefix=add_space_prefix))


def named(of: Tokenizer, text: str) -> int:
    return next(token for token in range(of.n_vocab) if of.token_text(token) == text)


# ---------------------------------------------------------------- ids with a role


def test_sentencepiece_files_have_default_ids():
    of = spm()
    assert (of.unk_id, of.bos_id, of.eos_id, of.pad_id, of.eot_id) == (0, 1, 2, None, None)
    assert of.eog_ids == {2}


def test_bpe_files_have_only_the_ids_that_they_name():
    of = bpe()
    assert (of.unk_id, of.bos_id, of.eos_id, of.pad_id, of.eot_id) == (None,) * 5
    assert of.eog_ids == frozenset()
    of = bpe(unknown_token_id=3, bos_token_id=4, eos_token_id=5, padding_token_id=6, eot_token_id=7)
    assert (of.unk_id, of.bos_id, of.eos_id, of.pad_id, of.eot_id) == (3, 4, 5, 6, 7)
    assert of.eog_ids == {5, 7}


def test_an_id_outside_the_vocabulary_is_as_if_missing():
    of = Tokenizer.from_metadata(spm_metadata(SPM_SCORES, bos_token_id=2**32 - 1, eos_token_id=100_000))
    assert (of.bos_id, of.eos_id) == (1, 2)


def test_end_of_turn_is_found_by_its_text():
    of = bpe({"<|im_end|>": CONTROL, "<|im_start|>": CONTROL})
    assert of.eot_id == named(of, "<|im_end|>")
    assert of.eog_ids == {named(of, "<|im_end|>")}


@pytest.mark.parametrize("text", ["</s>", "<|eom_id|>", "[EOS]", "<|file_sep|>", "<|fim_pad|>", "<reponame>", "<EOT>"])
def test_other_ends_of_generation_are_found_by_their_text(text):
    of = bpe({text: NORMAL})
    assert of.eog_ids == {named(of, text)}
    assert of.is_special(named(of, text))  # whatever type the file gives it


@pytest.mark.parametrize("others", [("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>")])
def test_end_is_no_end_beside_return_and_call(others):
    of = bpe(dict.fromkeys(("<|end|>", *others), CONTROL))
    assert of.eog_ids == {named(of, text) for text in others}
    assert not of.is_special(named(of, "<|end|>"))


def test_closing_s_is_plain_text_beside_tool_responses():
    of = bpe(dict.fromkeys(("</s>", "<|tool_response>"), CONTROL))
    assert of.eog_ids == {named(of, "<|tool_response>")}
    assert of.encode("</s>")[0] == named(of, "<")


def test_channel_markers_show_in_the_output():
    of = bpe({"<|channel|>": CONTROL})
    token = named(of, "<|channel|>")
    assert not of.is_special(token)
    assert of.decode([token], skip_special=True) == "<|channel|>"


# ---------------------------------------------------------------- white space around special tokens


def test_phi3_special_tokens_swallow_the_space_after_them():
    meta = spm_metadata(SPM_SCORES, specials={"<|end|>": CONTROL}, add_space_prefix=False)
    meta["general.name"] = "Phi-3 mini"
    of = Tokenizer.from_metadata(meta)
    end, a, bos, space = (named(of, text) for text in ("<|end|>", "a", "<s>", "▁a"))
    assert of.encode("a <|end|> \n a", add_bos=False) == [a, named(of, "▁"), end, a]
    assert of.encode("<s> a", add_bos=False) == [bos, space]
    assert of.encode("<|end|>  ", add_bos=False) == [end]


def test_swallowed_space_is_not_searched_again():
    meta = spm_metadata(SPM_SCORES, specials={"  ": USER_DEFINED}, add_space_prefix=False)
    meta["general.name"] = "phi3"
    of = Tokenizer.from_metadata(meta)
    assert of.encode("     a", add_bos=False) == [named(of, "  "), named(of, "a")]


def test_mask_tokens_swallow_the_space_before_them():
    of = bpe({"<mask>": CONTROL}, pre="jina-v2-de")
    a, mask, space = named(of, "a"), named(of, "<mask>"), named(of, "Ġ")
    assert of.encode("a  <mask> a<mask>") == [a, mask, space, a, mask]


# ---------------------------------------------------------------- ids to text


def test_pieces_by_token_type():
    specials = {"▁ctl": CONTROL, "▁own": USER_DEFINED, "▁no": UNUSED, "▁unk": UNKNOWN, "<0x41>x": BYTE, "▁txt": NORMAL}
    of = Tokenizer.from_metadata(spm_metadata({}, specials=specials))
    shown = {text: of.token_bytes(named(of, text)).decode() for text in specials}
    assert shown == {"▁ctl": "▁ctl", "▁own": "▁own", "▁no": "", "▁unk": "▁unk", "<0x41>x": "A", "▁txt": " txt"}


def test_skip_special_leaves_out_control_and_unknown_tokens():
    of = spm()
    ids = [1, 0, named(of, "a"), named(of, "<tool>"), 2]
    assert of.decode(ids) == "<s><unk>a<tool></s>"
    assert of.decode(ids, skip_special=True) == "a<tool>"


def test_decode_takes_the_added_space_away_once():
    of = spm()
    ids = of.encode("a a")
    assert ids == [1, named(of, "▁a"), named(of, "▁a")]
    assert of.decode(ids, skip_special=True) == "a a"
    assert of.decode_bytes(ids) == b"<s>a a"
    assert spm(add_space_prefix=False).decode([named(of, "▁a")]) == " a"


def test_a_character_outside_the_byte_alphabet_stands_for_itself():
    of = bpe({"中 Ġx": NORMAL})
    assert of.decode([named(of, "中 Ġx")]) == "中  x"


def test_an_empty_token_has_a_name_and_a_malformed_byte_token_is_an_error():
    meta = spm_metadata({"": 0.0}, specials={"<zz>": BYTE})
    of = Tokenizer.from_metadata(meta)
    assert of.token_text(of.n_vocab - 1) == f"[EMPTY_{of.n_vocab - 1}]"
    with pytest.raises(TokenizerError, match="token 3 is of the byte type but reads '<zz>'"):
        of.token_bytes(3)


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=60))
def test_text_survives_the_round_trip(text):
    of = _byte_level()
    assert of.decode(of.encode(text)) == text
    if "▁" not in text:
        assert spm().decode(spm().encode(text), skip_special=True) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_decode_replaces_what_is_no_utf8(ids):
    of = _byte_level()
    assert of.decode(ids) == of.decode_bytes(ids).decode("utf-8", errors="replace")


# ---------------------------------------------------------------- streams


def test_a_stream_keeps_an_unfinished_character_back():
    of = _byte_level()
    stream = of.stream()
    ids = of.encode("a🦩é")
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "🦩", "", "é"]
    assert stream.flush() == ""


def test_a_stream_replaces_bytes_once_they_are_certainly_wrong():
    of = _byte_level()
    stream = of.stream()
    flamingo, a = of.encode("🦩"), of.encode("a")[0]
    assert [stream.push(token) for token in [*flamingo[:3], a]] == ["", "", "", "\ufffda"]
    assert stream.push(flamingo[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(a) == "a"  # begins anew


def test_a_stream_keeps_the_leading_space():
    assert spm().stream().push(named(spm(), "▁a")) == " a"


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_a_stream_says_in_the_end_what_decode_says(ids):
    of = _byte_level()
    stream = of.stream()
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.flush() == of.decode(ids)
    for n in range(len(ids)):  # what has been said is never taken back
        assert of.decode(ids).startswith("".join(parts[:n]))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=3), max_size=12))
def test_a_stream_takes_any_split_of_bytes(pieces):
    stream = StreamDecoder(pieces.__getitem__)
    said = "".join(stream.push(i) for i in range(len(pieces))) + stream.flush()
    assert said == b"".join(pieces).decode("utf-8", errors="replace")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("token", [-1, 256, 10**9])
def test_an_id_outside_the_vocabulary_names_itself_and_the_limit(token):
    of = _byte_level()
    for call in (of.token_text, of.token_bytes, of.is_special, of.stream().push, lambda t: of.decode([t])):
        with pytest.raises(TokenizerError, match=f"token id {token} is outside .* n_vocab = 256"):
            call(token)


@pytest.mark.parametrize("text", [None, 3, ["a"], 1.5, bytearray(b"a")])
def test_text_of_another_type_was_an_attribute_error(text):
    with pytest.raises(TokenizerError, match=rf"^text is {re.escape(repr(text))}, must be a str or bytes$"):
        _byte_level().encode(text)


@pytest.mark.parametrize("flag", ["x", 1, 0, 1.0, [], np.int64(1)])
def test_anything_counted_as_a_flag(flag):
    of = _byte_level()
    complaint = f" is {re.escape(repr(flag))}, must be "
    with pytest.raises(TokenizerError, match=f"^add_bos{complaint}True, False or None$"):
        of.encode("a", add_bos=flag)
    with pytest.raises(TokenizerError, match=f"^parse_special{complaint}True or False$"):
        of.encode("a", parse_special=flag)
    for call in (of.decode, of.decode_bytes):
        with pytest.raises(TokenizerError, match=f"^skip_special{complaint}True or False$"):
            call([], skip_special=flag)


def test_flags_may_be_those_of_numpy():
    of = bpe(bos_token_id=3, eos_token_id=4, add_eos_token=True)
    a = of.encode("a", add_bos=False)
    assert of.encode("a", add_bos=np.True_) == [3, *a, 4]
    assert of.encode("a", add_bos=np.False_, parse_special=np.True_) == a
    assert of.decode(a, skip_special=np.False_) == "a"


@pytest.mark.parametrize("ids", [None, 3, 1.5, "abc", b"abc", np.array(7)])
def test_ids_that_are_no_sequence_were_a_type_error(ids):
    complaint = rf"^ids is {re.escape(repr(ids))}, must be token ids, one after another$"
    with pytest.raises(TokenizerError, match=complaint):
        _byte_level().decode(ids)


@pytest.mark.parametrize(
    "bad", [1.5, 1.0, None, True, np.True_, "a", b"a", [1], np.float32(1), np.array([1, 2]), np.array([1])]
)
def test_an_id_that_is_no_integer_was_taken_for_one(bad):
    of = _byte_level()
    of.decode(range(256))  # True and 1.0 must not be found among the pieces that are known already
    calls = (of.token_text, of.token_bytes, of.is_special, of.stream().push)
    for call in (*calls, lambda t: of.decode([t]), lambda t: of.decode([65, t], skip_special=True)):
        with pytest.raises(TokenizerError, match=rf"^token id {re.escape(repr(bad))} must be an integer$"):
            call(bad)


def test_ids_of_two_dimensions_were_a_type_error():
    with pytest.raises(TokenizerError, match=r"^token id array\(\[1, 2\]\) must be an integer$"):
        _byte_level().decode(np.array([[1, 2], [3, 4]]))


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_ids_may_be_integers_of_numpy(kind):
    of = _byte_level()
    assert of.decode(np.array([104, 105], kind)) == of.decode([kind(104), kind(105)]) == of.decode([104, 105])
    assert of.token_text(kind(104)) == of.token_text(104)


@pytest.mark.parametrize("key", ["model", "tokens"])
def test_a_missing_key_is_named(key):
    meta = bpe_metadata([])
    del meta[f"tokenizer.ggml.{key}"]
    with pytest.raises(TokenizerError, match=f"lacks 'tokenizer.ggml.{key}'"):
        Tokenizer.from_metadata(meta)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("model", 7, "a string, not int"),
        ("pre", b"x", "a string, not bytes"),
        ("tokens", "abc", "a list of strings, not str"),
        ("tokens", [1, 2], "a list of strings, not list"),
        ("merges", {}, "a list of strings, not dict"),
        ("token_type", "abc", "an array of numbers, not str"),
        ("bos_token_id", "1", "an integer, not str"),
        ("eos_token_id", True, "an integer, not bool"),
        ("add_bos_token", 1, "a bool, not int"),
        ("token_type", np.zeros(300, np.float32), "hold integers, not float32"),
    ],
)
def test_a_key_of_the_wrong_type_is_named(key, value, wanted):
    meta = {**bpe_metadata([]), f"tokenizer.ggml.{key}": value}
    with pytest.raises(
        TokenizerError, match=rf"'tokenizer\.ggml\.{key}' must {'' if 'hold' in wanted else 'be '}{wanted}"
    ):
        Tokenizer.from_metadata(meta)


def test_the_chat_template_is_the_files_own():
    assert bpe().chat_template is None
    assert Tokenizer.from_metadata({**bpe_metadata([]), "tokenizer.chat_template": "x"}).chat_template == "x"


def test_unknown_models_name_the_known_ones():
    with pytest.raises(TokenizerError, match="is 'bert'; known: gpt2, llama"):
        Tokenizer.from_metadata({**bpe_metadata([]), "tokenizer.ggml.model": "bert"})


def test_equal_tokens_are_an_error():
    with pytest.raises(TokenizerError, match="257 entries but 256 different"):
        bpe({"a": NORMAL})


def test_short_arrays_are_an_error():
    meta = {**bpe_metadata([]), "tokenizer.ggml.token_type": np.ones(5, np.int32)}
    with pytest.raises(TokenizerError, match=r"'tokenizer\.ggml\.token_type' has 5 entries, fewer than the 256 tokens"):
        Tokenizer.from_metadata(meta)


def test_bos_without_an_id_is_an_error():
    with pytest.raises(TokenizerError, match=r"no 'tokenizer\.ggml\.bos_token_id' to add"):
        bpe().encode("a", add_bos=True)


@cache
def _byte_level() -> Tokenizer:
    return bpe()
