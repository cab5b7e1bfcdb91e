"""Small vocabularies as GGUF metadata, and as files of that metadata alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""


def byte_chars() -> list[str]:
    """Return the characters that stand for the bytes: printable ones themselves, others from U+0100 on."""
    chars, hidden = [], 0
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        chars.append(chr(byte) if printable else chr(256 + hidden))
        hidden += not printable
    return chars


def bpe_metadata(
    merges: Iterable[str], *, pre: str = "gpt-2", specials: Mapping[str, int] | None = None, **extra: Any
) -> dict[str, Any]:
    """Return a byte-level BPE vocabulary: 256 bytes, what merges make, then specials by token type."""
    merges, specials = list(merges), dict(specials or {})
    tokens = list(dict.fromkeys([*byte_chars(), *(merge.replace(" ", "", 1) for merge in merges)]))
    types = [NORMAL] * len(tokens) + list(specials.values())
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *specials],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def spm_metadata(
    scores: Mapping[str, float], *, specials: Mapping[str, int] | None = None, **extra: Any
) -> dict[str, Any]:
    """Return a SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, specials, then the scored tokens."""
    specials = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | dict(specials or {})
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([*specials.values(), *[BYTE] * 256, *[NORMAL] * len(scores)], np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * (len(specials) + 256) + list(scores.values()), np.float32),
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def merges_everywhere(texts: Iterable[str], seed: int) -> list[str]:
    """Return merges of all neighbouring bytes in the texts, so that the ids show where words begin."""
    chars = byte_chars()
    pairs: set[tuple[str, str]] = set()
    for text in texts:
        symbols = [chars[byte] for byte in text.encode()]
        pairs.update(pairwise(symbols))
    ordered = sorted(pairs)
    random.Random(seed).shuffle(ordered)
    return [f"{left} {right}" for left, right in ordered]


def write_vocab(metadata: Mapping[str, Any], path: Path) -> Path:
    """Write a GGUF file that holds the metadata and no tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
