"""pykv's side of a benchmark: what a user's loop does, the making of each batch included."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

import numpy as np
from bookkeeping import fill_cells
from peer import serve, timed, tokens

import pykv

FLASH: dict[str, Any] = {"auto": "auto", "on": True, "off": False}


class PykvSide:
    """One model and one context; every time is in milliseconds."""

    def __init__(self) -> None:
        self._model: Any = None
        self._ctx: Any = None
        self._depth = 0

    def about(self) -> dict[str, Any]:
        """Tell what runs; with a context also how that attends."""
        told: dict[str, Any] = {"version": pykv.__version__, "kernels": "ggml of the installed libggml-python"}
        return told if self._ctx is None else told | {"attention": asdict(self._ctx.attention_path)}

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

    def context(
        self, n_ctx: int, n_threads: int, flash: str = "auto", n_ubatch: int = 512, attention: str = "auto"
    ) -> None:
        if self._ctx is not None:
            self._ctx.close()
        self._ctx = self._model.context(
            n_ctx=n_ctx,
            n_seq_max=4,
            kv_unified=True,
            flash_attn=FLASH[flash],
            attention=attention,
            n_threads=n_threads,
            n_ubatch=n_ubatch,
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

    # saved states of sequence 0

    def fill_rows(self) -> None:
        """Write numbers into K and V, that saving does not read pages nobody ever wrote."""
        rng = np.random.default_rng(0)
        for il in range(len(self._ctx.memory.spec.layers)):
            for tensor in self._ctx.memory.tensors(il):
                row = rng.integers(0, 256, tensor.ne[0] * 2, np.uint8)
                tensor.set(np.tile(row, tensor.ne[1] * tensor.ne[2]))

    def state_get(self) -> float:
        return timed(lambda: self._ctx.state_bytes(0, dialect="10/3"))

    def state_set(self) -> float:
        data = self._ctx.state_bytes(0, dialect="10/3")
        return timed(lambda: self._ctx.load_state_bytes(data, 0))

    def state_save(self, path: str) -> float:
        return timed(lambda: self._ctx.save_sequence(path, 0, dialect="10/3"))

    def state_load(self, path: str) -> float:
        return timed(lambda: self._ctx.load_sequence(path, 0))

    def plain_copy(self) -> float:
        """Time a copy of the same bytes into memory that is new to the process, as `state_bytes` returns them."""
        data = self._ctx.state_bytes(0, dialect="10/3")
        return timed(lambda: bytes(memoryview(data)))

    def plain_overwrite(self) -> float:
        """Time a copy of the same bytes onto others, as a state is set."""
        data = np.frombuffer(self._ctx.state_bytes(0, dialect="10/3"), np.uint8)
        onto = data.copy()
        return timed(lambda: np.copyto(onto, data))

    def plain_write(self, path: str, sync: bool) -> float:
        """Time writing the same bytes to a new file; with `sync`, until they are on the disk."""
        data = self._ctx.state_bytes(0, dialect="10/3")

        def write() -> None:
            with open(path, "wb", buffering=0) as file:
                assert file.write(data) == len(data)
                if sync:
                    os.fsync(file.fileno())

        return timed(write)

    def plain_read(self, path: str) -> float:
        """Time reading a file into memory that is there already."""
        onto = np.empty(os.path.getsize(path), np.uint8)
        onto.fill(0)

        def read() -> None:
            with open(path, "rb", buffering=0) as file:
                assert file.readinto(onto) == onto.size

        return timed(read)

    # memory verbs; each leaves the memory as `book` left it

    def book(self, depth: int) -> None:
        """Fill sequence 0 without computing: book `depth` cells; K and V stay what they are, zeros at first."""
        self.clear()
        fill_cells(self._ctx.memory.streams, depth)
        self._depth = depth

    def call_overhead(self, n: int) -> float:
        """Time a verb that finds nothing to do."""
        return sorted(timed(lambda: self._ctx.memory.seq_add(0, 0, -1, 0)) for _ in range(n))[n // 2]

    def seq_cp(self, n: int) -> list[float]:
        memory, times = self._ctx.memory, []
        for _ in range(n):
            times.append(timed(lambda: memory.seq_cp(0, 1)))
            memory.seq_rm(1)
        return times

    def seq_rm(self, n: int) -> list[float]:
        memory, times = self._ctx.memory, []
        for _ in range(n):
            memory.seq_cp(0, 1)
            times.append(timed(lambda: memory.seq_rm(1)))
        return times

    def seq_keep(self, n: int, n_foreign: int = 16) -> list[float]:
        """Time seq_keep where another sequence shares half the cells and a third one has a few of its own."""
        memory, times = self._ctx.memory, []
        for _ in range(n):
            memory.seq_cp(0, 1, 0, self._depth // 2)
            self._decode(tokens(n_foreign), seq_id=2)
            times.append(timed(lambda: memory.seq_keep(0)))
        return times

    def seq_add(self, n: int, delta: int = 7) -> list[float]:
        """Time a shift of the later half; there and back in turns."""
        half, times = self._depth // 2, []
        for i in range(2 * n):
            shift = (0, half, -1, delta) if i % 2 == 0 else (0, half + delta, -1, -delta)
            times.append(timed(lambda shift=shift: self._ctx.memory.seq_add(*shift)))  # type: ignore[misc]
        return times

    def tail_rm(self, n: int) -> list[float]:
        """Time the removal of the last token of a sequence, decoded just before."""
        times = []
        for i in range(n):
            self._decode([200 + i])
            times.append(timed(lambda: self._ctx.memory.seq_rm(0, self._depth, -1)))
        return times

    def k_shift(self, n: int, delta: int = 7) -> list[float]:
        """Time the K-shift of the later half, there and back in turns."""
        memory, half, times = self._ctx.memory, self._depth // 2, []
        memory.update()
        for i in range(2 * n):
            memory.seq_add(0, *((half, -1, delta) if i % 2 == 0 else (half + delta, -1, -delta)))
            times.append(timed(memory.update))
        return times

    def _decode(self, ids: list[int], seq_id: int = 0) -> float:
        begin = time.perf_counter()
        self._ctx.decode(pykv.Batch(ids, seq_id=seq_id))
        row = self._ctx.logits[-1]
        elapsed = time.perf_counter() - begin
        assert np.isfinite(row[0])
        return elapsed * 1e3


if __name__ == "__main__":
    serve(PykvSide())
