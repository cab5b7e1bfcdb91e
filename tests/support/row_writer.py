"""Given keys and values put into a KV cache, fast: a graph that only stores, kept for the next batch of its shape."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray
from support import on_device
from support.kv_scene import Token, plan_batch
from support.naive_rope import naive_rope

from pykv.batch import UBatch
from pykv.cells import SlotInfo
from pykv.ggml import Arena, Backend, DType, Graph, GraphInput, Sched
from pykv.memory import AttentionPath, KVCache, KVGraph, KVShape, LayerSpec, MemorySpec

Array = NDArray[np.float32]
Pair = tuple[Array, Array]
"""Keys before RoPE and values of one layer, (n_tokens, n_head_kv, head) each."""


def draw(spec: MemorySpec, n: int, rng: np.random.Generator) -> list[Pair]:
    """Return random keys and values of `n` tokens, for each layer."""

    def one(layer: LayerSpec) -> Pair:
        k, v = (
            rng.uniform(-1, 1, (n, layer.n_head_kv, head)).astype(np.float32)
            for head in (layer.n_embd_head_k, layer.n_embd_head_v)
        )
        return k, k[:, :, : layer.n_embd_head_v] if layer.k_only else v

    return [one(layer) for layer in spec.layers]


def rotated(layer: LayerSpec, raw: NDArray[np.floating], pos: Sequence[int] | NDArray[np.integer]) -> NDArray:
    """Return keys (n, n_head_kv, head) as they are at positions (n,), in float64."""
    if layer.rope is None:
        return raw.astype(np.float64)
    factors = None if layer.rope_factors is None else layer.rope_factors.numpy().ravel().astype(np.float64)
    front, back = np.split(raw.astype(np.float64), [layer.rope_at], axis=2)
    back = naive_rope(back, np.asarray(pos, np.float64), factors=factors, **asdict(layer.rope))
    return np.concatenate([front, back], axis=2)


class RowWriter:
    """Stores tokens in one cache. Close it, or use it in ``with``."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._stack = ExitStack()
        self._backends = self._stack.enter_context(on_device.backends())
        self._graphs: dict[tuple[int, int, bool], _StoreGraph] = {}

    def store(self, tokens: Sequence[Token], raw: Sequence[Pair], n_ubatch: int = 512) -> bool:
        """Store one batch, with keys rotated by their positions; False if there is no room."""
        plan = plan_batch(self.cache, tokens, n_ubatch)
        if plan is None:
            return False
        for i, ubatch in enumerate(plan.ubatches):
            self.write(plan.apply(i), plan.slots[i], ubatch, raw)
        return True

    def write(self, shape: KVShape, slot: SlotInfo, ubatch: UBatch, raw: Sequence[Pair]) -> None:
        """Store the tokens of a ubatch that was applied, out of those of its batch."""
        key = (shape.n_tokens, shape.n_stream, self.cache.store.v_trans)
        if key not in self._graphs:
            self._graphs[key] = _StoreGraph(self.cache, shape, self._backends)
        self._graphs[key].run(slot, ubatch, [(k[ubatch.batch_idxs], v[ubatch.batch_idxs]) for k, v in raw])

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.sched.close()
        self._graphs.clear()
        self._stack.close()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _StoreGraph:
    def __init__(self, cache: KVCache, shape: KVShape, backends: Sequence[Backend]) -> None:
        budget = 32 * len(cache.spec.layers) + 32
        self.cache, self.graph = cache, Graph(Arena(budget, budget))
        # how many cells a query looks at does not matter: nobody asks
        self.kv = KVGraph(self.graph, cache, shape, AttentionPath.FLASH)
        self.given: list[tuple[GraphInput, ...]] = []
        arena, n = self.graph.arena, shape.n_tokens
        for il, layer in enumerate(cache.spec.layers):
            k = GraphInput(arena.tensor(DType.F32, (layer.n_embd_head_k, layer.n_head_kv, n), f"k{il}"))
            v = GraphInput(arena.tensor(DType.F32, (layer.n_embd_head_v, layer.n_head_kv, n), f"v{il}"))
            self.kv.store(il, k.tensor, None if layer.k_only else v.tensor)
            self.given.append((k,) if layer.k_only else (k, v))
        self.sched = Sched(backends, budget, [*cache.owners, arena])
        self.sched.allocate(self.graph)
        for one in (*(one for pair in self.given for one in pair), *self.kv.inputs):
            one.bind()

    def run(self, slot: SlotInfo, ubatch: UBatch, raw: Sequence[Pair]) -> None:
        for il, (pair, inputs) in enumerate(zip(raw, self.given, strict=True)):
            arrays = (rotated(self.cache.spec.layers[il], pair[0], ubatch.pos[0]), pair[1])
            for one, array in zip(inputs, arrays, strict=False):  # V may be read out of K
                one.array[0] = array
                one.commit()
        self.kv.fill(slot, ubatch)
        self.sched.compute(self.graph)
