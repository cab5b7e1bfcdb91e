"""SentencePiece's BPE: neighbours become one token, best score first, until no two neighbours form a token.

The `tokenizers` library ranks pairs and has no equal ranks, while scores do tie (the leftmost pair then goes
first), and its table of pairs would take seconds to derive for 262k tokens. So the merge loop is here, after
`llm_tokenizer_spm_session` in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise

from pykv.errors import TokenizerError
from pykv.runtime.tokenizer.vocab import Vocab

SPACE = "▁"
"""The character that stands for a space in this family's tokens."""

_NO_TOKEN = float("-inf")
_SHORT = 64  # up to here a plain scan of the scores beats a heap
_CACHED_WORDS = 1 << 16
_LENGTH_BY_HIGH_BITS = (1,) * 12 + (2, 2, 3, 4)


class SpmEncoder:
    """Turns text without special tokens into ids."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Return the ids of a fragment; it may hold bytes that are not UTF-8, as lone surrogates."""
        if after_special and self._vocab.add_space_prefix:
            text = " " + text
        try:
            text.encode()
        except UnicodeEncodeError:
            return self._ids_of(self._merge(_malformed_symbols(text)))
        ids: list[int] = []
        for word in self._word_pattern.findall(text.replace(" ", SPACE)):
            ids += self._words.get(word) or self._encode_word(word)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        if not word:
            return []
        ids = self._ids_of(self._merge(list(word)))
        if len(word) <= _SHORT:
            if len(self._words) >= _CACHED_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids

    def _merge(self, symbols: list[str]) -> list[str]:
        merge = _merge_few if len(symbols) <= _SHORT else _merge_many
        return merge(symbols, self._vocab.ids, self._scores)

    def _ids_of(self, symbols: list[str]) -> list[int]:
        ids: list[int] = []
        known = self._vocab.ids
        for symbol in symbols:
            token = known.get(symbol)
            if token is not None:
                ids.append(token)
            else:
                ids.extend(map(self._byte_id, symbol.encode("utf-8", "surrogateescape")))
        return ids

    def _byte_id(self, byte: int) -> int:
        token = self._byte_ids[byte]
        if token is None:
            # differs from llama.cpp: an error, because there the lookup ends the process
            raise TokenizerError(f"the vocabulary has no token for the byte 0x{byte:02X}")
        return token

    @cached_property
    def _scores(self) -> list[float]:
        """Score by id; the last one is for the id -1, no token."""
        return [*self._vocab.scores.tolist(), _NO_TOKEN]

    @cached_property
    def _byte_ids(self) -> list[int | None]:
        ids = self._vocab.ids
        plain = [ids.get(chr(byte)) if byte < 0x80 else None for byte in range(256)]
        return [ids.get(f"<0x{byte:02X}>", plain[byte]) for byte in range(256)]

    @cached_property
    def _word_pattern(self) -> re.Pattern[str]:
        """Match the parts that no token can reach across: each merges as it would within the whole.

        That is before a space, unless some token holds the character before it and the space side by side.
        """
        between = "\ufdd0"  # no character of any text
        parts = between.join(self._vocab.tokens).split(SPACE)
        joiners = {part[-1] for part in parts[:-1] if part} - {between}
        word = f"{SPACE}*[^{SPACE}]*"
        if joiners:
            word += f"(?:(?<=[{re.escape(''.join(sorted(joiners)))}]){SPACE}+[^{SPACE}]*)*"
        return re.compile(word)


def _merge_few(symbols: list[str], ids: Mapping[str, int], scores: Sequence[float]) -> list[str]:
    """Return the symbols after all merges: the pair with the best score first, of equal ones the leftmost."""
    token = ids.get
    gains = [scores[token(left + right, -1)] for left, right in pairwise(symbols)]
    while gains and (best := max(gains)) > _NO_TOKEN:
        i = gains.index(best)
        del gains[i]
        merged = symbols[i] = symbols[i] + symbols.pop(i + 1)
        if i > 0:
            gains[i - 1] = scores[token(symbols[i - 1] + merged, -1)]
        if i < len(gains):
            gains[i] = scores[token(merged + symbols[i + 1], -1)]
    return symbols


def _merge_many(symbols: list[str], ids: Mapping[str, int], scores: Sequence[float]) -> list[str]:
    """Do the same with a heap and a linked list, for long texts without a place to cut."""
    n = len(symbols)
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))
    heap: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < n:
            joined = symbols[left] + symbols[right]
            token = ids.get(joined)
            if token is not None:
                heappush(heap, (-scores[token], left, right, len(joined)))

    for i in range(n - 1):
        offer(i, i + 1)
    while heap:
        _, left, right, size = heappop(heap)
        # note: symbols only grow, so an equal total length means that both are as they were when offered
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[right] < n:
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [symbol for symbol in symbols if symbol]


def _malformed_symbols(text: str) -> list[str]:
    """Return the characters of bytes that are not all UTF-8, each as long as its first byte promises.

    Such a symbol may swallow the bytes after it; it keeps a lone surrogate, so it is never a token.
    """
    raw = text.encode("utf-8", "surrogateescape").replace(b" ", SPACE.encode())
    symbols = []
    i = 0
    while i < len(raw):
        size = _LENGTH_BY_HIGH_BITS[raw[i] >> 4]
        symbols.append(raw[i : i + size].decode("utf-8", "surrogateescape"))
        i += size
    return symbols
