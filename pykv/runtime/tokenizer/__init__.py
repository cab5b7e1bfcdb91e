"""Text to tokens and back, by the vocabulary of a GGUF file."""

from __future__ import annotations

from pykv.runtime.tokenizer.detokenize import StreamDecoder
from pykv.runtime.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
