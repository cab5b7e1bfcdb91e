"""Cut text at the special tokens in it, as `tokenizer_st_partition` in llama.cpp's llama-vocab.cpp does."""

from __future__ import annotations

import re
from functools import cached_property

from pykv.runtime.tokenizer.special_ids import Attr
from pykv.runtime.tokenizer.vocab import Vocab

Fragment = int | str
"""A special token's id, or text between special tokens."""

_C_SPACE = " \t\n\v\f\r"
_C_SPACES = frozenset(_C_SPACE)


class SpecialText:
    """Finds special tokens: longer ones first, each wherever it stands in what the longer ones left over.

    With `parse_special` all of them are found, without it only the user-defined ones.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._lstrip, self._rstrip = _stripping(vocab)

    def split(self, text: str, parse_special: bool) -> list[Fragment]:
        """Return the special ids in the text and the text around them, in order, without empty pieces."""
        fragments: list[Fragment] = [text] if text else []
        finder = self._all if parse_special else self._user_defined
        for token in finder.present(text):
            fragments = self._cut(fragments, token)
        return fragments

    @cached_property
    def _all(self) -> _Finder:
        return _Finder({self._vocab.tokens[token]: token for token in self._vocab.matchable.tolist()})

    @cached_property
    def _user_defined(self) -> _Finder:
        attrs, hidden = self._vocab.attrs, Attr.CONTROL | Attr.UNKNOWN
        ids = [token for token in self._vocab.matchable.tolist() if not attrs[token] & hidden]
        return _Finder({self._vocab.tokens[token]: token for token in ids})

    def _cut(self, fragments: list[Fragment], token: int) -> list[Fragment]:
        result: list[Fragment] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                result.append(fragment)
            else:
                result += self._cut_text(fragment, token)
        return result

    def _cut_text(self, text: str, token: int) -> list[Fragment]:
        special = self._vocab.tokens[token]
        swallows_before, swallows_after = token in self._lstrip, token in self._rstrip
        result: list[Fragment] = []
        start = 0
        while (at := text.find(special, start)) >= 0:
            before = text[start:at].rstrip(_C_SPACE) if swallows_before else text[start:at]
            result += [before, token] if before else [token]
            start = at + len(special)
            while swallows_after and text[start : start + 1] in _C_SPACES:
                start += 1
        if start < len(text):
            result.append(text[start:])
        return result


class _Finder:
    """Tells which of many texts stand in a text, without looking for each of them.

    A vocabulary may have thousands of special tokens, a prompt has a handful: only the places where two
    characters begin some token are looked at.
    """

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        self._longest = max(map(len, ids), default=0)
        lengths: dict[str, set[int]] = {}
        seconds: dict[str, set[str]] = {}
        for text in ids:
            lengths.setdefault(text[0], set()).add(len(text))
            seconds.setdefault(text[0], set()).add(text[1:2])
        self._lengths = {first: tuple(sorted(sizes)) for first, sizes in lengths.items()}
        self._starts = re.compile("|".join(_start_pattern(first, second) for first, second in seconds.items()))

    def present(self, text: str) -> list[int]:
        """Return the ids whose texts occur, longest text (in bytes) first."""
        if not self._ids:
            return []
        found: set[str] = set()
        seen: set[str] = set()
        for match in self._starts.finditer(text):
            start = match.start()
            window = text[start : start + self._longest]
            if window in seen:  # a long run of one character has few different windows
                continue
            seen.add(window)
            candidates = (window[:size] for size in self._lengths[window[0]])
            found.update(candidate for candidate in candidates if candidate in self._ids)
        return [self._ids[special] for special in sorted(found, key=self._rank)]

    def _rank(self, special: str) -> tuple[int, int]:
        # differs from llama.cpp: equally long tokens go by id, because its order among them is unspecified
        return -len(special.encode()), self._ids[special]


def _start_pattern(first: str, seconds: set[str]) -> str:
    if "" in seconds:
        return re.escape(first)
    return f"{re.escape(first)}(?=[{re.escape(''.join(sorted(seconds)))}])"


def _stripping(vocab: Vocab) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tokens that swallow white space before and after them.

    The file does not tell them; llama.cpp knows them by the model's name.
    """
    name = vocab.name.lower()
    none: frozenset[int] = frozenset()

    def ids(*texts: str) -> frozenset[int]:
        return frozenset(vocab.ids[text] for text in texts if text in vocab.ids)

    if vocab.pre in {"jina-v2-de", "jina-v2-es", "jina-v2-code"} or vocab.arch in {
        "nomic-bert-moe",
        "jina-bert-v3",
    }:
        return ids("<mask>"), none
    if "phi-3" in name or "phi3" in name:
        swallow = frozenset(vocab.matchable.tolist()) | ids("</s>")
        return none, swallow - ids("<unk>", "<s>", "<|endoftext|>")
    if "modern-bert" in name:
        return ids("[MASK]"), none
    return none, none
