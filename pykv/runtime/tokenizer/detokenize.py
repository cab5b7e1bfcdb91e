"""From ids back to bytes and text. Follows `token_to_piece` in llama.cpp's llama-vocab.cpp."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from pykv.errors import TokenizerError
from pykv.runtime.tokenizer.bpe import bytes_of_token
from pykv.runtime.tokenizer.special_ids import Attr
from pykv.runtime.tokenizer.spm import SPACE
from pykv.runtime.tokenizer.vocab import Vocab


def piece(vocab: Vocab, token: int) -> bytes:
    """Return what a token adds to the output; special ones show their own text, unused ones nothing."""
    text = vocab.tokens[token]
    if vocab.has(token, Attr.CONTROL | Attr.UNKNOWN | Attr.USER_DEFINED):
        return text.encode()
    if vocab.has(token, Attr.NORMAL):
        return text.replace(SPACE, " ").encode() if vocab.model == "llama" else bytes_of_token(text)
    if vocab.has(token, Attr.BYTE):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            raise TokenizerError(f"token {token} is of the byte type but reads {text!r}, not <0xXX>") from None
    return b""


class StreamDecoder:
    """Text of tokens as they come: whole characters only.

    A character's bytes may be spread over several tokens; they are kept back until it is complete. Bytes that
    can no longer become one turn into U+FFFD. A leading space stays: a stream continues a prompt.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Add a token and return the text that is now certain, perhaps none."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """End the stream: return U+FFFD for an unfinished character, and begin anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
