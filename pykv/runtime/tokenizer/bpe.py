"""Byte-level BPE: words of a pattern, each merged pair by pair in the order of the file's merges.

The `tokenizers` library does the work. Where it differs from llama.cpp (`llm_tokenizer_bpe_session`) it is
set right: characters without a token, and bytes that are not UTF-8.
"""

from __future__ import annotations

from functools import cached_property

from tokenizers import Regex
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from pykv.errors import TokenizerError
from pykv.runtime.tokenizer.pretokenize import PRE_TOKENIZERS, engine_pattern
from pykv.runtime.tokenizer.vocab import Vocab


def _byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte (GPT-2's encoder.py, `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]


BYTE_CHARS = _byte_alphabet()
_BYTES_TO_CHARS = dict(enumerate(BYTE_CHARS))
_CHARS_TO_BYTES = {ord(char): chr(byte) for byte, char in enumerate(BYTE_CHARS)}


def bytes_of_token(text: str) -> bytes:
    """Return the bytes that a token's text stands for."""
    try:
        return text.translate(_CHARS_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        # differs from llama.cpp: a character outside the alphabet stands for itself, because "[UNK_BYTE_…]",
        # as it writes, was never in a text
        return b"".join(
            _CHARS_TO_BYTES[ord(char)].encode("latin-1") if ord(char) in _CHARS_TO_BYTES else char.encode()
            for char in text
        )


class BpeEncoder:
    """Turns text without special tokens into ids."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._rules = PRE_TOKENIZERS[vocab.pre]
        self._stand_ins: dict[int, list[int]] = {}

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Return the ids of a fragment; it may hold bytes that are not UTF-8, as lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError:
            ids = self._encode_malformed(text)
        else:
            ids = self._engine.encode(text, add_special_tokens=False).ids
        return self._without_stand_ins(ids) if self._stand_ins else ids

    @cached_property
    def _engine(self) -> Engine:
        """The library's tokenizer. Built at the first use: it takes longer than all the rest of loading."""
        engine = Engine(self._model())
        engine.pre_tokenizer = Sequence([*self._splits(), ByteLevel(add_prefix_space=False, use_regex=False)])
        return engine

    def _splits(self) -> list[Split]:
        return [Split(Regex(engine_pattern(pattern)), "isolated") for pattern in self._rules.patterns]

    def _model(self) -> BPE:
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in self._vocab.merges)]
        if len(set(self._vocab.merges)) < len(merges):
            merges = list(dict.fromkeys(merges))  # the first of two equal merges counts
        # note: over a result that is longer than every token the library panics, so results are seen to first
        missing = [text for text in (*BYTE_CHARS, *map("".join, merges)) if text not in self._vocab.ids]
        try:
            return self._model_with(merges, missing)
        except Exception:  # the library raises nothing more precise
            missing += [part for merge in merges for part in merge if part not in self._vocab.ids]
        try:
            return self._model_with(merges, missing)
        except Exception as error:
            raise TokenizerError(f"'tokenizer.ggml.merges' cannot be used: {error}") from error

    def _model_with(self, merges: list[tuple[str, str]], missing: list[str]) -> BPE:
        """Build a model in which texts without a token have an id behind the last one.

        note: without it the library drops such a character first and merges its neighbours.
        """
        n_vocab, ids = len(self._vocab.tokens), self._vocab.ids
        extra = {text: n_vocab + i for i, text in enumerate(dict.fromkeys(missing))}
        vocab = {**ids, **extra} if extra else ids
        model = BPE(vocab, merges, ignore_merges=self._rules.ignore_merges)
        self._stand_ins = {token: _ids_of_bytes(text, ids) for text, token in extra.items()}
        return model

    def _without_stand_ins(self, ids: list[int]) -> list[int]:
        n_vocab = len(self._vocab.tokens)
        if not ids or max(ids) < n_vocab:
            return ids
        return [real for token in ids for real in self._stand_ins.get(token, (token,))]

    def _encode_malformed(self, text: str) -> list[int]:
        """Encode a fragment that holds bytes which are not UTF-8.

        Surrogates cannot enter the library, so words are cut on a text where a private character, alike to
        all patterns, takes their place.
        """
        raw = text.encode("utf-8", "surrogateescape")
        decoded = decode_leniently(raw)
        private = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in decoded)
        hidden = "".join(private if "\ud800" <= char <= "\udfff" else char for char in decoded)
        ids: list[int] = []
        for _, (start, end) in Sequence(list(self._splits())).pre_tokenize_str(hidden):
            word = decoded[start:end].encode("utf-8", "surrogatepass").decode("latin-1")
            ids.extend(token.id for token in self._engine.model.tokenize(word.translate(_BYTES_TO_CHARS)))
        return ids


def decode_leniently(raw: bytes) -> str:
    """Decode UTF-8 as llama.cpp does: overlong forms and surrogates pass, each other stray byte is U+FFFD.

    Source: `unicode_cpts_from_utf8` in unicode.cpp.
    """
    chars: list[str] = []
    i = 0
    while i < len(raw):
        size = _LENGTH_BY_LEAD[raw[i] >> 3]
        tail = raw[i + 1 : i + size]
        code = raw[i] & (0x7F if size == 1 else 0x7F >> size)
        for byte in tail:
            code = code << 6 | byte & 0x3F
        whole = size > 0 and len(tail) == size - 1 and all(byte >> 6 == 0b10 for byte in tail)
        # differs from llama.cpp: a code above U+10FFFF is stray bytes, because there it ends the process
        if whole and code <= 0x10FFFF:
            chars.append(chr(code))
            i += size
        else:
            chars.append("\ufffd")
            i += 1
    return "".join(chars)


_LENGTH_BY_LEAD = (1,) * 16 + (0,) * 8 + (2,) * 4 + (3,) * 2 + (4,) + (0,)
"""Bytes of a character by the upper five bits of its first byte; 0: no character begins so."""


def _ids_of_bytes(text: str, ids: dict[str, int]) -> list[int]:
    # note: the bytes are those of the stand-in characters themselves, so only ASCII can have a token
    return [ids[char] for char in text if char.isascii() and char in ids]
