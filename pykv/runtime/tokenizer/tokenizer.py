"""The tokenizer of a GGUF file: text to ids as llama.cpp makes them, ids to text. Never reads files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pykv.errors import TokenizerError
from pykv.runtime.tokenizer.bpe import BpeEncoder
from pykv.runtime.tokenizer.detokenize import StreamDecoder, piece
from pykv.runtime.tokenizer.metadata import Metadata
from pykv.runtime.tokenizer.special_ids import Attr
from pykv.runtime.tokenizer.special_text import SpecialText
from pykv.runtime.tokenizer.spm import SpmEncoder
from pykv.runtime.tokenizer.vocab import Vocab
from pykv.typing import as_bool, as_int

_SPECIAL = Attr.CONTROL | Attr.UNKNOWN


class _Encoder(Protocol):
    def encode(self, text: str, *, after_special: bool) -> list[int]: ...


class Tokenizer:
    """Text to tokens and back, by the vocabulary of one model.

    `bos_id`, `eos_id`, `eot_id`, `unk_id` and `pad_id` are None where the vocabulary has no such token;
    `eog_ids` are all tokens that end a generation.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._encoder: _Encoder = SpmEncoder(vocab) if vocab.model == "llama" else BpeEncoder(vocab)
        self._special_text = SpecialText(vocab)
        self._pieces: dict[int, bytes] = {}
        self.n_vocab = len(vocab.tokens)
        self.bos_id = vocab.special.bos
        self.eos_id = vocab.special.eos
        self.eot_id = vocab.special.eot
        self.unk_id = vocab.special.unk
        self.pad_id = vocab.special.pad
        self.eog_ids = vocab.special.eog
        self.chat_template = vocab.chat_template

    @classmethod
    def from_metadata(cls, meta: Metadata) -> Tokenizer:
        """Build a tokenizer from a file's key-value pairs (str, int, float, bool, list of str, numpy arrays).

        Raises
        ------
        TokenizerError : a `tokenizer.ggml.*` key is missing, of the wrong type, or names something unknown.
        """
        return cls(Vocab.from_metadata(meta))

    def encode(self, text: str | bytes, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """Return the ids of a text; bytes need not be valid UTF-8.

        `add_bos`: None adds BOS and EOS as the file asks; False adds neither; True adds BOS in any case, and
        EOS as the file asks. `parse_special`: whether control tokens written in the text count as tokens;
        user-defined ones always do.

        Raises
        ------
        TokenizerError : an argument of another type, or BOS or EOS is asked for and the file names none.
        """
        _check_flag("add_bos", add_bos, or_none=True)
        _check_flag("parse_special", parse_special)
        ids: list[int] = []
        after_special = True
        if self._vocab.add_bos if add_bos is None else add_bos:
            ids.append(self._required("bos_token_id", self.bos_id))
        for fragment in self._special_text.split(_escape(text), parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
                after_special = True
            else:
                ids += self._encoder.encode(fragment, after_special=after_special)
                after_special = False
        if self._vocab.add_eos and (add_bos is None or add_bos):
            ids.append(self._required("eos_token_id", self.eos_id))
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Return the text of some tokens; bytes that are no UTF-8 become U+FFFD.

        `skip_special` leaves out control and unknown tokens. The space that encoding put before the first
        word is taken away again.

        Raises
        ------
        TokenizerError : an id that is no integer or not in the vocabulary, or an argument of another type.
        """
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """Return the bytes of some tokens, as `decode` does."""
        # differs from llama.cpp: spaces before punctuation stay, because removing them would change the text
        _check_flag("skip_special", skip_special)
        pieces: list[bytes] = []
        strip_next = self._vocab.add_space_prefix
        for token in map(self._checked, _iterable(ids)):
            data = self._piece(token)
            if self._vocab.has(token, _SPECIAL):
                if skip_special:
                    continue
            elif strip_next:
                # differs from llama.cpp: done after a leading BOS too, because encoding puts the space there
                data = data.removeprefix(b" ")
                strip_next = False
            pieces.append(data)
        return b"".join(pieces)

    def stream(self) -> StreamDecoder:
        """Return a decoder that takes one token at a time."""
        return StreamDecoder(self.token_bytes)

    def token_text(self, token: int) -> str:
        """Return a token as the vocabulary spells it."""
        return self._vocab.tokens[self._checked(token)]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the output; special tokens show their own text."""
        return self._piece(self._checked(token))

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token or the unknown token: no text of its own."""
        return self._vocab.has(self._checked(token), _SPECIAL)

    def _piece(self, token: int) -> bytes:
        data = self._pieces.get(token)
        if data is None:
            data = self._pieces[token] = piece(self._vocab, token)
        return data

    def _checked(self, token: int) -> int:
        number = as_int(token)
        if number is None:
            raise TokenizerError(f"token id {token!r} must be an integer")
        if not 0 <= number < self.n_vocab:
            raise TokenizerError(f"token id {token} is outside the vocabulary of n_vocab = {self.n_vocab}")
        return number

    def _required(self, key: str, token: int | None) -> int:
        if token is None:
            raise TokenizerError(f"the vocabulary has no 'tokenizer.ggml.{key}' to add")
        return token


def _escape(text: str | bytes) -> str:
    """Return text in which each byte that is not part of UTF-8 is a lone surrogate."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "surrogateescape")
    if not isinstance(text, str):
        raise TokenizerError(f"text is {text!r}, must be a str or bytes")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    return text


def _iterable(ids: Iterable[int]) -> Iterable[int]:
    try:
        if isinstance(ids, (str, bytes)):  # the bytes of a text would pass for ids
            raise TypeError
        return iter(ids)
    except TypeError:
        raise TokenizerError(f"ids is {ids!r}, must be token ids, one after another") from None


def _check_flag(name: str, value: object, *, or_none: bool = False) -> None:
    if as_bool(value) is None and not (or_none and value is None):
        accepted = "True, False or None" if or_none else "True or False"
        raise TokenizerError(f"{name} is {value!r}, must be {accepted}")
