"""pykv's side of a benchmark: what a user's loop does, the making of each batch included."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from peer import serve, tokens

import pykv

FLASH: dict[str, Any] = {"auto": "auto", "on": True, "off": False}


class PykvSide:
    """One model and one context; every time is in milliseconds."""

    def __init__(self) -> None:
        self._model: Any = None
        self._ctx: Any = None
        self._depth = 0

    def about(self) -> dict[str, str]:
        return {"version": pykv.__version__, "kernels": "ggml of the installed libggml-python"}

    def load(self, path: str, tokenizer: bool = False) -> float:
        """Load the model, replacing the one before; with `tokenizer`, up to the first encoded text."""
        self.unload()
        begin = time.perf_counter()
        self._model = pykv.Model.load(path)
        if tokenizer:
            self._model.tokenizer.encode("Hello")
        return (time.perf_counter() - begin) * 1e3

    def unload(self) -> None:
        for thing in (self._ctx, self._model):
            if thing is not None:
                thing.close()
        self._ctx = self._model = None

    def context(self, n_ctx: int, n_threads: int, flash: str = "auto") -> None:
        self._ctx = self._model.context(
            n_ctx=n_ctx, n_seq_max=4, kv_unified=True, flash_attn=FLASH[flash], n_threads=n_threads
        )

    def clear(self) -> None:
        self._ctx.memory.clear(False)
        self._depth = 0

    def fill(self, depth: int) -> None:
        """Decode ordinary tokens, 512 at a time, until the sequence is `depth` tokens long."""
        while self._depth < depth:
            n = min(512, depth - self._depth)
            self._decode(tokens(n, self._depth))
            self._depth += n

    def prompt(self, n: int) -> float:
        """Time n tokens at once into an empty memory, up to the last token's logits."""
        self.clear()
        return self._decode(tokens(n))

    def steps(self, n: int) -> list[float]:
        """Time n single tokens, each at the present depth: what was added is removed before the next."""
        times = []
        for i in range(n):
            times.append(self._decode([200 + i]))
            self._ctx.memory.seq_rm(0, self._depth, -1)
        return times

    def _decode(self, ids: list[int]) -> float:
        begin = time.perf_counter()
        self._ctx.decode(pykv.Batch(ids))
        row = self._ctx.logits[-1]
        elapsed = time.perf_counter() - begin
        assert np.isfinite(row[0])
        return elapsed * 1e3


if __name__ == "__main__":
    serve(PykvSide())
