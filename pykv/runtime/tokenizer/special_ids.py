"""Which tokens begin, end and separate text: read from the file, and where it is silent found by their text.

Files often leave these ids out; llama.cpp (`llama_vocab::impl::load`) knows the spellings of many families.
"""

# ruff: noqa: RUF001  (the look-alike characters are the models' own)

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pykv.errors import TokenizerError
from pykv.log import logger
from pykv.runtime.tokenizer.metadata import Metadata, integer
from pykv.typing import AnyArray

log = logger(__name__)


class Attr:
    """What a token is, as bits; the file's types are mapped by `ATTR_OF_TYPE`. Plain ints: they are read per token."""

    NONE = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    BYTE = 16
    UNUSED = 32


ATTR_OF_TYPE = np.array(
    [Attr.NONE, Attr.NORMAL, Attr.UNKNOWN, Attr.CONTROL, Attr.USER_DEFINED, Attr.UNUSED, Attr.BYTE], np.uint8
)
"""By `tokenizer.ggml.token_type`: undefined, normal, unknown, control, user defined, unused, byte."""

EOT_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
EOG_TEXTS = (
    *EOT_TEXTS,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)
EOM_TEXTS = ("<|eom_id|>",)
FIM_PAD_TEXTS = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")
FIM_REPO_TEXTS = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
FIM_FILE_TEXTS = ("<|file_sep|>",)
FIM_AROUND_TEXTS = (
    (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
)
FIM_AROUND_KEYS = (
    ("fim_pre_token_id", "prefix_token_id"),
    ("fim_suf_token_id", "suffix_token_id"),
    ("fim_mid_token_id", "middle_token_id"),
)
RENDERED_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Control tokens whose text belongs in the output: they structure the answer of one model family."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role, None where the vocabulary has no such token; `eog` ends a generation."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    eot: int | None = None
    eog: frozenset[int] = frozenset()


class SpecialIdFinder:
    """Collects the ids of one vocabulary. Corrects `attrs` in place where a spelling contradicts the file."""

    def __init__(self, meta: Metadata, ids: dict[str, int], attrs: AnyArray) -> None:
        self._meta = meta
        self._ids = ids
        self._attrs = attrs

    def find(self, defaults: SpecialIds) -> SpecialIds:
        """Return the ids; `defaults` hold where the file says nothing."""
        eos = self._from_file("eos_token_id", default=defaults.eos)
        eot = self._from_file_or_text("eot_token_id", EOT_TEXTS)
        eom = self._from_file_or_text("eom_token_id", EOM_TEXTS)
        for keys, texts in zip(FIM_AROUND_KEYS, FIM_AROUND_TEXTS, strict=True):
            if self._from_file(*keys) is None:
                self._from_text(texts)
        ends = {
            eos,
            eot,
            eom,
            self._from_file_or_text("fim_pad_token_id", FIM_PAD_TEXTS),
            self._from_file_or_text("fim_rep_token_id", FIM_REPO_TEXTS),
            self._from_file_or_text("fim_sep_token_id", FIM_FILE_TEXTS),
            *(self._from_text((text,)) for text in EOG_TEXTS),
        }
        for text in RENDERED_TEXTS:
            if (token := self._ids.get(text)) is not None:
                self._attrs[token] = Attr.USER_DEFINED
        return replace(
            defaults,
            bos=self._from_file("bos_token_id", default=defaults.bos),
            eos=eos,
            unk=self._from_file("unknown_token_id", default=defaults.unk),
            pad=self._from_file("padding_token_id", default=defaults.pad),
            eot=eot,
            eog=frozenset(self._without_false_ends({token for token in ends if token is not None})),
        )

    def _from_file_or_text(self, key: str, texts: tuple[str, ...]) -> int | None:
        found = self._from_file(key)
        return self._from_text(texts) if found is None else found

    def _from_file(self, *keys: str, default: int | None = None) -> int | None:
        n_vocab = len(self._attrs)
        found = default if default is not None and default < n_vocab else None
        for key in keys:
            token = integer(self._meta, f"tokenizer.ggml.{key}")
            if token is None:
                continue
            if 0 <= token < n_vocab:
                found = token
            else:
                log.warning("tokenizer.ggml.%s = %d is outside the %d tokens: using %s", key, token, n_vocab, found)
        return found

    def _from_text(self, texts: tuple[str, ...]) -> int | None:
        # differs from llama.cpp: the first spelling listed wins, because there a hash table's order decides
        for text in texts:
            token = self._ids.get(text)
            if token is not None:
                self._attrs[token] |= Attr.CONTROL
                return token
        return None

    def _without_false_ends(self, eog: set[int]) -> set[int]:
        """Drop tokens that end a message in most models but, beside certain others, only a part of one."""

        def ends(text: str) -> bool:
            return self._ids.get(text, -1) in eog

        calls = ends("<|call|>") or ends("<|calls|>")
        if ends("<|end|>") and calls and (ends("<|return|>") or ends("<|flush|>")):
            self._retire("<|end|>", eog, Attr.USER_DEFINED)
        if ends("</s>") and (ends("<|tool_response>") or ends("<|plamo:eos|>")):
            self._retire("</s>", eog, Attr.NORMAL)
        return eog

    def _retire(self, text: str, eog: set[int], attr: int) -> None:
        token = self._ids[text]
        eog.discard(token)
        self._attrs[token] = attr


def attrs_of_types(types: AnyArray | None, n_vocab: int) -> AnyArray:
    """Return the attributes (n_vocab,) of the file's token types; without types all are normal."""
    if types is None:
        return np.full(n_vocab, Attr.NORMAL, np.uint8)
    if types.dtype.kind not in "iu":
        raise TokenizerError(f"'tokenizer.ggml.token_type' must hold integers, not {types.dtype}")
    known = (types >= 0) & (types < len(ATTR_OF_TYPE))
    return ATTR_OF_TYPE[np.where(known, types, 0)]
