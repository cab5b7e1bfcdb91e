"""Tokenizers as slow and plain as they can be written, to compare the real ones with.

They work on bytes where llama.cpp does, know nothing of caches or heaps, and look at every token for every text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise

from support.tiny_vocab import byte_chars

Fragment = int | bytes


def partition(raw: bytes, specials: Sequence[tuple[bytes, int]]) -> list[Fragment]:
    """Cut at special tokens: longest first, each one wherever it stands in the rest, from the left."""
    fragments: list[Fragment] = [raw]
    for text, token in sorted(specials, key=lambda special: (-len(special[0]), special[1])):
        result: list[Fragment] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                result.append(fragment)
                continue
            rest = fragment
            while (at := rest.find(text)) >= 0:
                result += [rest[:at], token]
                rest = rest[at + len(text) :]
            result.append(rest)
        fragments = result
    return [fragment for fragment in fragments if fragment != b""]


def merge_by_rank(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Merge the pair with the lowest rank, of equal ones the leftmost, until none is left."""
    symbols = list(symbols)
    while True:
        known = [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not known:
            return symbols
        _, i = min(known)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def merge_by_score(symbols: Sequence[bytes], scores: Mapping[bytes, float]) -> list[bytes]:
    """Merge the neighbours whose joined text has the best score, of equal ones the leftmost, until none is left."""
    symbols = list(symbols)
    while True:
        known = [
            (-scores[left + right], i) for i, (left, right) in enumerate(pairwise(symbols)) if left + right in scores
        ]
        if not known:
            return symbols
        _, i = min(known)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def bpe_ids(text: str, words: Sequence[str], ids: Mapping[str, int], merges: Sequence[str]) -> list[int]:
    """Return byte-level BPE ids of a text that is cut into these words; what has no token is left out."""
    assert "".join(words) == text
    chars = byte_chars()
    ranks: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        ranks.setdefault((left, right), rank)
    found: list[int] = []
    for word in words:
        for symbol in merge_by_rank([chars[byte] for byte in word.encode()], ranks):
            if symbol in ids:
                found.append(ids[symbol])
            else:
                found += [ids[char] for char in symbol if char.isascii() and char in ids]
    return found


def spm_ids(raw: bytes, ids: Mapping[bytes, int], scores: Mapping[bytes, float]) -> list[int]:
    """Return SentencePiece ids of bytes: spaces are escaped, then all of it is merged at once."""
    raw = raw.replace(b" ", "▁".encode())
    symbols: list[bytes] = []
    while raw:
        lead = raw[0]
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        symbols.append(raw[:size])
        raw = raw[size:]
    found: list[int] = []
    for symbol in merge_by_score(symbols, scores):
        if symbol in ids:
            found.append(ids[symbol])
        else:
            found += [ids[b"<0x%02X>" % byte] for byte in symbol]
    return found


def gpt2_words(text: str) -> list[str]:
    """Cut a text as GPT-2 does, one character at a time (of Unicode 14 or older)."""
    words: list[str] = []
    while text:
        size = _gpt2_word(text)
        words.append(text[:size])
        text = text[size:]
    return words


def _gpt2_word(text: str) -> int:
    """Return the length of the first word."""
    for suffix in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        if text.startswith(suffix):
            return len(suffix)
    start = 1 if text[0] == " " and len(text) > 1 else 0
    kind = _kind(text[start])
    if kind != "space":
        return start + _run(text[start:], kind)
    spaces = _run(text, "space")
    return spaces if spaces == len(text) or spaces == 1 else spaces - 1


def _run(text: str, kind: str) -> int:
    return next((i for i, char in enumerate(text) if _kind(char) != kind), len(text))


def _kind(char: str) -> str:
    if char.isspace() and char not in "\x1c\x1d\x1e\x1f":
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(char)[0], "other")
