"""One sequence whose positions are moved, and where each of its tokens must be by now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from support.kv_scene import run
from support.row_writer import RowWriter, draw, rotated

from pykv.ggml import Arena, Buffer, DType, Tensor, cpu_device
from pykv.memory import KVCache

STEPS = {"q8_0": 1 / 127, "q5_0": 1 / 16, "q5_1": 2 / 31, "q4_0": 1 / 8, "q4_1": 2 / 15, "iq4_nl": 26 / 127}
"""The widest gap between two values that a type can store, in units of the largest one in a block."""

NEAR = {"f32": 1e-5, "f16": 2e-3, "bf16": 16e-3}
"""The largest error of a key of size 1; bf16 has three bits less than f16."""


@contextmanager
def rope_factors(values: Sequence[float]) -> Iterator[Tensor]:
    """Lend a tensor of frequency factors."""
    with Arena(1) as arena:
        tensor = arena.tensor(DType.F32, (len(values),), "factors")
        with Buffer.allocate(arena, cpu_device().buffer_type, "factors") as buffer:
            buffer.adopt(tensor).set(np.array(values, np.float32))
            yield tensor


class MovedKeys:
    """Tokens at positions 0 to n-1 of sequence 0, in the cells of the same numbers."""

    def __init__(self, cache: KVCache, n: int, seed: int = 0) -> None:
        self.cache, self.pos = cache, np.arange(n)
        self.raw = draw(cache.spec, n, np.random.default_rng(seed))
        self.n_turns = 0
        with RowWriter(cache) as writer:
            assert writer.store(run(0, range(n)), self.raw)
        self._moved = False

    def add(self, p0: int, p1: int, delta: int) -> None:
        """Move what lies in ``[p0, p1)``; nothing may fall below 0."""
        self.cache.seq_add(0, p0, p1, delta)
        self.pos[self._within(p0, p1)] += delta
        self._moved = True

    def div(self, p0: int, p1: int, d: int) -> None:
        """Divide what lies in ``[p0, p1)``."""
        self.cache.seq_div(0, p0, p1, d)
        self.pos[self._within(p0, p1)] //= d
        self._moved = True

    def update(self) -> None:
        """Let the keys follow."""
        self.cache.update()
        self.n_turns += self._moved
        self._moved = False

    def off(self, il: int) -> NDArray[np.float64]:
        """Return how far a layer's keys are from fresh ones."""
        order = np.argsort(self.pos, kind="stable")
        fresh = rotated(self.cache.spec.layers[il], self.raw[il][0][order], self.pos[order])
        return np.abs(self.cache.k(il, 0) - fresh)

    def check(self, type_k: str) -> None:
        """Compare all keys with fresh ones."""
        self.update()
        for il in range(len(self.cache.spec.layers)):
            off = self.off(il)
            if type_k in NEAR:
                assert off.max() <= NEAR[type_k], f"layer {il}: {off.max():.1e} off"
            else:
                # errors of several roundings add up like steps in random directions
                most = 0.6 * STEPS[type_k] * np.sqrt(1 + self.n_turns)
                assert np.sqrt(np.square(off).mean()) <= most, f"layer {il}: {np.sqrt(np.square(off).mean()):.1e} off"
        self.cache.check()

    def _within(self, p0: int, p1: int) -> NDArray[np.bool_]:
        return (self.pos >= max(p0, 0)) & ((self.pos < p1) | (p1 < 0))
