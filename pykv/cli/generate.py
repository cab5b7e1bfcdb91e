"""Prompt in, tokens out, both timed. What the commands share; a program of one's own needs none of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykv.errors import BatchError, ContextLengthExceeded

if TYPE_CHECKING:
    from pykv.runtime import Context
    from pykv.runtime.sampling import Sampler
    from pykv.runtime.tokenizer import Tokenizer


@dataclass
class Pace:
    """How many tokens took how long."""

    n_tokens: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Tokens a second, 0 before the first."""
        return self.n_tokens / self.seconds if self.seconds else 0.0

    def record(self) -> dict[str, float]:
        """Return the figures for JSON."""
        return {
            "n_tokens": self.n_tokens,
            "seconds": round(self.seconds, 6),
            "tokens_per_s": round(self.per_second, 2),
        }


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of what a chat template wrote; it may have put the begin token there already."""
    bos = tokenizer.bos_id
    has_bos = bos is not None and text.startswith(tokenizer.token_text(bos))
    return tokenizer.encode(text, add_bos=False if has_bos else None)


def prefill(context: Context, tokens: Sequence[int], seq_id: int = 0, pace: Pace | None = None) -> Pace:
    """Decode a prompt of any length, batch by batch, with the logits of its last token.

    Returns `pace`, which counts what was stored also where Ctrl-C ends it.

    Raises
    ------
    BatchError
        The prompt is empty.
    ContextLengthExceeded
        The prompt does not leave room for one more token. Nothing has been decoded.
    """
    from pykv import Batch

    stored = context.memory.pos_max(seq_id) + 1
    if stored + len(tokens) >= context.n_ctx_seq:
        raise ContextLengthExceeded(
            f"{len(tokens)} more tokens after {stored} stored ones; the context holds {context.n_ctx_seq}"
        )
    if not tokens:
        raise BatchError("the prompt is empty")
    pace, begun = pace or Pace(), time.perf_counter()
    try:
        for start in range(0, len(tokens), context.n_batch):
            piece = tokens[start : start + context.n_batch]
            is_last = start + len(piece) == len(tokens)
            context.decode(Batch(piece, seq_id=seq_id, logits="last" if is_last else "none"))
    finally:
        pace.n_tokens += context.memory.pos_max(seq_id) + 1 - stored
        pace.seconds += time.perf_counter() - begun
    return pace


class Generation:
    """Tokens after a prompt of one sequence, sampled one by one.

    Attributes
    ----------
    pace : tokens and time so far, without the time that the caller takes between two tokens.
    stop : why it ended: "end" (the model's end token), "limit", "context full"; "" while it goes on.
    """

    def __init__(self, context: Context, sampler: Sampler, eog_ids: Sequence[int] | frozenset[int]) -> None:
        self.pace = Pace()
        self.stop = ""
        self._context = context
        self._sampler = sampler
        self._eog_ids = frozenset(eog_ids)

    def tokens(self, limit: int, seq_id: int = 0) -> Iterator[int]:
        """Yield at most `limit` tokens; every token but the last one yielded is stored in the memory."""
        from pykv import Batch

        room = self._context.n_ctx_seq - 1 - self._context.memory.pos_max(seq_id)
        for i in range(limit):
            begun = time.perf_counter()
            token = self._sampler.sample(self._context.logits[-1])
            self._sampler.accept(token)
            if token in self._eog_ids:
                self.stop = "end"
                return
            self.pace.n_tokens += 1
            self.pace.seconds += time.perf_counter() - begun
            yield token
            if i + 1 == limit:
                self.stop = "limit"
                return
            if i == room:
                self.stop = "context full"
                return
            begun = time.perf_counter()
            self._context.decode(Batch([token], seq_id=seq_id))
            self.pace.seconds += time.perf_counter() - begun
