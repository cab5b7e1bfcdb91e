"""The same ids and the same text as llama.cpp, on hard strings: both real vocabularies, and every pre-tokenizer."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.oracle_vocab import VARIANTS, ask_llama_cpp, decode_request, encode_request
from support.tiny_vocab import (
    CONTROL,
    USER_DEFINED,
    bpe_metadata,
    byte_chars,
    merges_everywhere,
    spm_metadata,
    write_vocab,
)
from support.tokenize_strings import tricky_strings

from pykv.gguf import GGUFFile
from pykv.runtime.tokenizer import Tokenizer
from pykv.runtime.tokenizer.pretokenize import PRE_TOKENIZERS

pytestmark = pytest.mark.oracle

N_STRINGS = 2000
SEED = 20260
SCORES = {
    "▁": -1.0,
    "▁the": -9.0,
    "th": -2.0,
    "he": -2.0,
    "the": -3.0,
    " ": -4.0,
    "aa": -5.0,
    "aaa": -5.0,
    "lo": -6.0,
    "or▁": -7.0,
}
SPECIALS = {
    "<|end|>": CONTROL,
    "<mask>": CONTROL,
    "<|end|><mask>": USER_DEFINED,
    "<|e": USER_DEFINED,
    "  ": USER_DEFINED,
}


def _small_vocabularies() -> dict[str, dict[str, Any]]:
    """Return vocabularies by the property that they are about."""
    merges = ["h e", "l l", "he ll", "a a", "aa a", "Ġ a", "\x21 !", "x y", "Ġ Ġ", "ĠĠ Ġ"]
    gaps = bpe_metadata(merges, specials=SPECIALS, bos_token_id=0, eos_token_id=0)
    lost = {"x", "xy", "ll", byte_chars()[0x04], byte_chars()[0xE3]}
    kept = [i for i, text in enumerate(gaps["tokenizer.ggml.tokens"]) if text not in lost]
    for key in ("tokens", "token_type"):
        values = gaps[f"tokenizer.ggml.{key}"]
        gaps[f"tokenizer.ggml.{key}"] = [values[i] for i in kept] if key == "tokens" else values[kept]
    spm = spm_metadata(SCORES, specials={**SPECIALS, "<|endoftext|>": CONTROL})
    end = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_space_prefix": False}
    return {
        "space-prefix": spm,
        "swallowed-space-after": {**spm, **end, "general.name": "Phi-3 mini"},
        "swallowed-space-before": bpe_metadata(
            merges, pre="jina-v2-de", specials=SPECIALS, bos_token_id=0, eos_token_id=0, add_eos_token=True
        ),
        "gaps": gaps,
        "merges-longer-than-tokens": {
            **bpe_metadata([], specials={"<m>": CONTROL}, bos_token_id=0, eos_token_id=0),
            "tokenizer.ggml.merges": ["Ġ e", "h e", "Ġe r", "Ã ¤", "Ġ Ġ", "ĠĠ Ġ"],
        },
    }


SMALL_VOCABULARIES = _small_vocabularies()


@pytest.fixture(params=["smollm2_path", "gemma3_path"])
def model_path(request) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.model
def test_real_vocabularies_give_the_same_ids(model_path):
    tokenizer, strings = _tokenizer(model_path), tricky_strings(N_STRINGS, SEED)
    answers = ask_llama_cpp(model_path, map(encode_request, strings))
    differences = [
        (text, variant, ids, expected)
        for text, answer in zip(strings, answers, strict=True)
        for variant, expected in zip(VARIANTS, answer, strict=True)
        if (ids := _encode(tokenizer, text, *variant)) != expected
    ]
    assert differences[:3] == []


@pytest.mark.model
def test_real_vocabularies_give_the_same_text(model_path):
    tokenizer, strings = _tokenizer(model_path), tricky_strings(N_STRINGS, SEED)
    encoded = [_encode(tokenizer, text, False, True) for text in strings]
    every = [[token] for token in range(0, tokenizer.n_vocab, 97)]
    requests = [decode_request(ids, special) for ids in encoded + every for special in (True, False)]
    answers = ask_llama_cpp(model_path, requests)
    for request, answer in zip(requests, answers, strict=True):
        text = tokenizer.decode_bytes(request["decode"], skip_special=not request["special"])
        assert text == base64.b64decode(answer), request


@pytest.mark.model
def test_text_survives_the_round_trip(model_path):
    tokenizer = _tokenizer(model_path)
    missing = _characters_it_cannot_hold(tokenizer)
    texts = [text for text in tricky_strings(N_STRINGS, SEED) if isinstance(text, str)]
    texts = [text for text in texts if not missing(text)]
    assert len(texts) > N_STRINGS // 2
    for text in texts:
        assert tokenizer.decode(_encode(tokenizer, text, False, True)) == text


@pytest.mark.model
def test_special_ids_are_the_same(model_path):
    tokenizer = _tokenizer(model_path)
    [info] = ask_llama_cpp(model_path, [{"info": True}])
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_id) == (info["n_vocab"], info["bos"], info["eos"])
    assert tokenizer.pad_id == info["pad"]
    assert sorted(tokenizer.eog_ids) == info["eog"]


@pytest.mark.slow
@pytest.mark.parametrize("pre", sorted({rules: name for name, rules in PRE_TOKENIZERS.items()}.values()))
def test_every_pre_tokenizer_cuts_the_same_words(tmp_path, pre):
    strings = [text for text in tricky_strings(1200, SEED + 1) if isinstance(text, str) and len(text) < 400]
    metadata = bpe_metadata(merges_everywhere(strings, SEED), pre=pre, bos_token_id=0, eos_token_id=0)
    path = write_vocab(metadata, tmp_path / "vocab.gguf")
    tokenizer = Tokenizer.from_metadata(metadata)
    answers = ask_llama_cpp(path, (encode_request(text, [(False, False)]) for text in strings))
    for text, [expected] in zip(strings, answers, strict=True):
        assert _encode(tokenizer, text, False, False) == expected, text


@pytest.mark.parametrize("name", sorted(SMALL_VOCABULARIES))
def test_small_vocabularies_with_rare_properties_give_the_same_ids(tmp_path, name):
    metadata = SMALL_VOCABULARIES[name]
    path = write_vocab(metadata, tmp_path / "vocab.gguf")
    tokenizer = Tokenizer.from_metadata(metadata)
    specials = [text for text in metadata["tokenizer.ggml.tokens"] if len(text) > 2 and text[:3] != "<0x"]
    strings = tricky_strings(700, SEED + 2, specials=[*specials, *(f" {text} \n" for text in specials)])
    answers = ask_llama_cpp(path, map(encode_request, strings))
    for text, answer in zip(strings, answers, strict=True):
        for variant, expected in zip(VARIANTS, answer, strict=True):
            assert _encode(tokenizer, text, *variant) == expected, (text, variant)


def _encode(tokenizer: Tokenizer, text: str | bytes, add_special: bool, parse_special: bool) -> list[int]:
    return tokenizer.encode(text, add_bos=None if add_special else False, parse_special=parse_special)


def _tokenizer(path: Path) -> Tokenizer:
    with GGUFFile(path) as file:
        return Tokenizer.from_metadata(dict(file.metadata))


def _characters_it_cannot_hold(tokenizer: Tokenizer) -> Callable[[str], bool]:
    """Return a test for text with bytes that have no token, or with an escape that means something else."""
    tokens = {tokenizer.token_text(token) for token in range(tokenizer.n_vocab)}
    if "<0x00>" in tokens:
        return lambda text: "▁" in text
    missing = {byte for byte, char in enumerate(byte_chars()) if char not in tokens}
    return lambda text: not missing.isdisjoint(text.encode())
