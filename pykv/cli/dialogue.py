"""Several conversations that speak in the same batches, each its likeliest token: what the demo shows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykv.cli.generate import Pace

if TYPE_CHECKING:
    from pykv.runtime import Context, Model


@dataclass(frozen=True)
class Spoken:
    """What each sequence said, and the paces of reading and of speaking, over all sequences."""

    said: dict[int, str]
    prompt: Pace
    generation: Pace


def speak(model: Model, context: Context, prompts: Mapping[int, list[int]], limit: int) -> Spoken:
    """Let each sequence read its prompt and answer with at most `limit` tokens, all in one batch a step.

    Every token of the answers is stored in the memory, so that each sequence can go on from there.
    """
    tokens: dict[int, list[int]] = {s: [] for s in prompts}
    pending = dict(prompts)
    prompt, generation = Pace(), Pace()
    while pending:
        begun = time.perf_counter()
        best = _decode(context, pending)
        pace = generation if prompt.n_tokens else prompt
        pace.n_tokens += sum(map(len, pending.values()))
        pace.seconds += time.perf_counter() - begun
        pending = {
            s: [token] for s, token in best.items() if token not in model.tokenizer.eog_ids and len(tokens[s]) < limit
        }
        for s, piece in pending.items():
            tokens[s] += piece
    return Spoken({s: model.tokenizer.decode(ids) for s, ids in tokens.items()}, prompt, generation)


def _decode(context: Context, pending: Mapping[int, list[int]]) -> dict[int, int]:
    """Decode the pending tokens of all sequences at once; return the likeliest next token of each."""
    from pykv import Batch

    lengths = [len(piece) for piece in pending.values()]
    is_last = np.zeros(sum(lengths), np.bool_)
    is_last[np.cumsum(lengths) - 1] = True
    batch = Batch(
        np.concatenate([np.array(piece, np.int32) for piece in pending.values()]),
        seq_id=np.repeat(np.array(list(pending), np.int32), lengths),
        logits=is_last,
    )
    context.decode(batch)
    return dict(zip(pending, map(int, context.logits.argmax(axis=1)), strict=True))


def next_turn(model: Model, stored: str, chat: Sequence[Mapping[str, str]], question: str) -> list[int]:
    """Return the tokens that lead from a stored conversation to the answer to the next question.

    `stored` is the text in the memory, the last answer of `chat` included. The chat template writes the whole
    conversation; what it has beyond the stored text is new. Where a template rewrites the past, the question
    stands alone.
    """
    asked = {"role": "user", "content": question}
    whole = model.chat_template.render([*chat, asked])
    new = whole.removeprefix(stored) if whole.startswith(stored) else model.chat_template.render([asked])
    return model.tokenizer.encode(new, add_bos=False)
