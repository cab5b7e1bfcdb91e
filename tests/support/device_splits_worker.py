"""A model whose layers are spread over several devices: a client of `four_devices`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


def greedy(path: str, text: str, n: int, tolerance: float) -> dict[str, Any]:
    """Let the CPU say `n` tokens behind a text, each the likeliest.

    Returns the text's tokens, these, and for each whether an NMSE of `tolerance` could not have made it another.
    """
    from support.nmse import clear_winner

    with _opened(path, {}) as ctx:
        prompt, clear = ctx.model.tokenizer.encode(text), list[bool]()
        tokens = list(prompt)
        row = _decoded(ctx, prompt)[-1:]
        for _ in range(n):
            tokens.append(int(row[0].argmax()))
            clear += clear_winner(row, tolerance).tolist()
            row = _decoded(ctx, tokens[-1:])
    return {"prompt": prompt, "tokens": tokens[len(prompt) :], "clear": clear}


def split(path: str, layers: Sequence[str], prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
    """Decode a prompt and what the CPU said behind it on these devices, the first two tokens each by itself.

    Returns what would have been said instead of each token, and the NMSE of all logits to the CPU's.
    """
    from support.nmse import nmse

    said = tuple(tokens)
    found = _rows(path, tuple(layers), tuple(prompt), said)
    return {"tokens": found.argmax(axis=1).tolist(), "nmse": nmse(found, _expected(path, tuple(prompt), said))}


@cache
def _expected(path: str, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> np.ndarray:
    return _rows(path, (), prompt, tokens)


def _rows(path: str, layers: tuple[str, ...], prompt: tuple[int, ...], tokens: tuple[int, ...]) -> np.ndarray:
    """Return the logits before each token."""
    with _opened(path, dict(enumerate(layers))) as ctx:
        found = [_decoded(ctx, prompt)[-1:], *(_decoded(ctx, [token]) for token in tokens[:2])]
        return np.concatenate([*found, _decoded(ctx, tokens[2:-1])])


@contextmanager
def _opened(path: str, overrides: dict[int, str]) -> Iterator[Any]:
    """Open a context of a model on the CPU, but for some layers."""
    import pykv

    params = {"n_ctx": 256, "n_threads": 1, "attention": "flash"}
    with pykv.Model.load(path, ["CPU"], overrides=overrides, repack=False, isolate=False) as model:
        assert [model.placement.layers[il].name for il in overrides] == list(overrides.values())
        with model.context(**params) as ctx:
            yield ctx


def _decoded(ctx: Any, tokens: Sequence[int]) -> np.ndarray:
    import pykv

    ctx.decode(pykv.Batch(tokens, logits="all"))
    return np.array(ctx.logits)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.device_models import meet
    from support.rpc_worker import serve

    serve(meet, greedy, split)
