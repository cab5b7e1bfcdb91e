"""The vocabulary of a GGUF file: texts, scores, attributes and the ids with a role. Never tokenizes.

Follows `llama_vocab::impl::load` in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pykv.errors import TokenizerError
from pykv.runtime.tokenizer.metadata import Metadata, flag, numbers, string, strings
from pykv.runtime.tokenizer.pretokenize import PRE_TOKENIZERS
from pykv.runtime.tokenizer.special_ids import Attr, SpecialIdFinder, SpecialIds, attrs_of_types
from pykv.typing import AnyArray, F32Array

MODELS = ("gpt2", "llama")
"""Values of `tokenizer.ggml.model` that pykv can run: byte-level BPE, and SentencePiece's BPE."""


@dataclass(frozen=True, eq=False)
class Vocab:
    """Everything the file says about its tokens, and nothing that needs the file to stay open.

    `attrs` (n_vocab,) holds `Attr` bits, `scores` (n_vocab,) say what SentencePiece merges first, `merges` (in order)
    what BPE does. `name` and `arch` are the model's.
    """

    model: str
    pre: str
    tokens: list[str]
    ids: dict[str, int]
    attrs: AnyArray
    special: SpecialIds
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    merges: list[str]
    scores: F32Array
    name: str
    arch: str
    chat_template: str | None

    @classmethod
    def from_metadata(cls, meta: Metadata) -> Vocab:
        """Read a vocabulary, with llama.cpp's defaults for what the file leaves out.

        Raises
        ------
        TokenizerError : a key is missing, of the wrong type, or names something unknown.
        """
        model = _model(meta)
        tokens = strings(meta, "tokenizer.ggml.tokens")
        if "" in tokens:
            tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(tokens)]
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) != len(tokens):
            raise TokenizerError(f"'tokenizer.ggml.tokens' has {len(tokens)} entries but {len(ids)} different texts")
        attrs = attrs_of_types(numbers(meta, "tokenizer.ggml.token_type", len(tokens)), len(tokens))
        is_spm = model == "llama"
        pre = "default" if is_spm else _pre(meta)
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            ids=ids,
            attrs=attrs,
            special=SpecialIdFinder(meta, ids, attrs).find(_default_ids(model, pre)),
            add_bos=flag(meta, "tokenizer.ggml.add_bos_token", is_spm or PRE_TOKENIZERS[pre].add_bos),
            add_eos=flag(meta, "tokenizer.ggml.add_eos_token", False),
            add_space_prefix=flag(meta, "tokenizer.ggml.add_space_prefix", is_spm),
            merges=[] if is_spm else strings(meta, "tokenizer.ggml.merges"),
            scores=_scores(meta, len(tokens)),
            name=string(meta, "general.name") or "",
            arch=string(meta, "general.architecture") or "",
            chat_template=string(meta, "tokenizer.chat_template"),
        )

    @cached_property
    def matchable(self) -> AnyArray:
        """Ids (n,) of the tokens that are looked for in text before it is tokenized."""
        return np.flatnonzero(self.attrs & (Attr.CONTROL | Attr.USER_DEFINED | Attr.UNKNOWN))

    def has(self, token: int, attr: int) -> bool:
        """Whether a token has any of these `Attr` bits."""
        return self._attr_bytes[token] & attr != 0

    @cached_property
    def _attr_bytes(self) -> bytes:
        return self.attrs.tobytes()


def _model(meta: Metadata) -> str:
    model = string(meta, "tokenizer.ggml.model")
    if model is None:
        raise TokenizerError("the metadata lacks 'tokenizer.ggml.model'")
    if model not in MODELS:
        raise TokenizerError(f"'tokenizer.ggml.model' is {model!r}; known: {', '.join(MODELS)}")
    return model


def _pre(meta: Metadata) -> str:
    pre = string(meta, "tokenizer.ggml.pre") or "default"
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(f"'tokenizer.ggml.pre' is {pre!r}; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    return pre


def _default_ids(model: str, pre: str) -> SpecialIds:
    if model == "llama":
        return SpecialIds(bos=1, eos=2, unk=0)
    # differs from llama.cpp: no BOS or EOS where a BPE file names none, because its default of 11 is Falcon's
    return SpecialIds(bos=11, eos=11) if pre == "falcon" else SpecialIds()


def _scores(meta: Metadata, n_vocab: int) -> F32Array:
    scores = numbers(meta, "tokenizer.ggml.scores", n_vocab)
    if scores is None:
        return np.zeros(n_vocab, np.float32)
    if np.isnan(scores).any():
        raise TokenizerError(f"'tokenizer.ggml.scores' is NaN for token {int(np.isnan(scores).argmax())}")
    # note: the smallest float stands for -inf, which the merge loop keeps for "no such token"
    return np.maximum(scores.astype(np.float32), np.finfo(np.float32).min)
