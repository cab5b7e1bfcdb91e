"""Known keys and values in a cache, without a model: what is stored can be told from a token and a position alone.

A key is RoPE of a raw key, which depends on the token; a value depends on the token only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support import on_device
from support.cell_state import state
from support.naive_rope import naive_rope

from pykv.batch import Batch, BatchLimits, UBatch, validate
from pykv.cells import SlotInfo
from pykv.ggml import Arena, DType, Graph, GraphInput, RopeParams
from pykv.memory import AttentionPath, KVCache, KVGraph, KVShape, LayerSpec, MemorySpec
from pykv.memory.kv_context import KVContext

F32Array = NDArray[np.float32]
Raw = Callable[[int, LayerSpec], F32Array]
"""Token and layer → its key before RoPE, (n_head_kv, n_embd_head_k)."""

TOY = LayerSpec(1, 2, 2, RopeParams(2))
"""Two elements, both rotated: the key (1, 0) at position p is (cos p, sin p)."""

NEAR = {"f32": 1e-5, "f16": 2e-3}
"""How far a key may be from one that was written at its position."""


def toy_spec(n_layer: int = 1, **settings: object) -> MemorySpec:
    """Return layers of the toy."""
    return MemorySpec.uniform(n_layer, TOY, **settings)


def one(_: int, layer: LayerSpec) -> F32Array:
    """Return the raw key (1, 0, 1, 0, ...) of the toy, for every token."""
    return np.tile(np.array([1, 0], np.float32), (layer.n_head_kv, layer.n_embd_head_k // 2))


def wavy(token: int, layer: LayerSpec) -> F32Array:
    """Return the raw key sin(i + 1 + 3 token)."""
    n = layer.n_head_kv * layer.n_embd_head_k
    return np.sin(np.arange(n) + 1 + 3 * token, dtype=np.float32).reshape(layer.n_head_kv, -1)


def value(token: int, layer: LayerSpec) -> F32Array:
    """Return the value of a token: its id first, exact in every float type up to 256."""
    row = token + np.arange(layer.n_head_kv * layer.n_embd_head_v, dtype=np.float32) / 4
    return row.reshape(layer.n_head_kv, -1)


class KeyScene:
    """Stores tokens in a cache and knows what keys they must have.

    Parameters
    ----------
    raw : the keys before RoPE.
    """

    def __init__(self, cache: KVCache, raw: Raw = one) -> None:
        self.cache, self.raw = cache, raw

    def store(self, seq_id: int, positions: Iterable[int], tokens: Sequence[int] | None = None) -> None:
        """Store one batch of a sequence; tokens are numbered like positions unless given."""
        pos = list(positions)
        plan = self.plan(seq_id, pos, tokens)
        assert plan is not None, f"no room for positions {pos} of sequence {seq_id}"
        for i, ubatch in enumerate(plan.ubatches):
            self.write(plan.apply(i), plan.slots[i], ubatch)

    def plan(
        self, seq_id: int, positions: Sequence[int], tokens: Sequence[int] | None = None, n_ubatch: int = 512
    ) -> KVContext | None:
        """Find room for tokens of one sequence, None if there is none."""
        batch = Batch(list(positions if tokens is None else tokens), pos=list(positions), seq_id=seq_id)
        limits = BatchLimits(
            n_tokens_max=4096,
            n_vocab=4096,
            n_seq_max=self.cache.settings.n_seq_max,
            n_pos_per_embd=self.cache.spec.n_pos_per_embd,
        )
        return self.cache.init_batch(validate(batch, limits, self.cache), n_ubatch)

    def write(self, shape: KVShape, slot: SlotInfo, ubatch: UBatch) -> None:
        """Compute keys and values of a ubatch that was applied and store them, in all layers."""
        layers = self.cache.spec.layers
        budget = 64 * len(layers)
        graph = Graph(Arena(budget, budget))
        kv = KVGraph(graph, self.cache, shape, AttentionPath.FLASH)
        given = []
        for il, layer in enumerate(layers):
            k = np.array([self.raw(int(t), layer) for t in ubatch.token])
            k = fresh(k, ubatch.pos[0], layer)
            pair = (k, np.array([value(int(t), layer) for t in ubatch.token]))
            inputs = [GraphInput(graph.arena.tensor(DType.F32, x.shape[::-1], f"x{il}")) for x in pair]
            kv.store(il, inputs[0].tensor, inputs[1].tensor)
            given += zip(inputs, pair, strict=True)
        with on_device.sched(budget, [*self.cache.owners, graph.arena]) as sched:
            sched.allocate(graph)
            for input_ in (*(input_ for input_, _ in given), *kv.inputs):
                input_.bind()
            for input_, x in given:
                input_.array[0] = x
                input_.commit()
            kv.fill(slot, ubatch)
            sched.compute(graph)

    def held(self, seq_id: int) -> list[tuple[int, int]]:
        """Return (position, token) of a sequence in order, the tokens told from the stored values."""
        cells = self.cache.streams.cells[self.cache.streams.stream_of(seq_id)]
        pos = np.sort(cells.pos[cells.member(seq_id)]).tolist()
        tokens = np.rint(self.cache.v(0, seq_id)[:, 0, 0]).astype(int).tolist()
        return list(zip(pos, tokens, strict=True))

    def check(self, seq_id: int, near: float) -> list[tuple[int, int]]:
        """Compare all keys of a sequence with fresh ones and all values with their tokens'; returns `held`."""
        held = self.held(seq_id)
        pos = np.array([p for p, _ in held])
        for il, layer in enumerate(self.cache.spec.layers):
            if held:
                raw = np.array([self.raw(token, layer) for _, token in held])
                off = np.abs(self.cache.k(il, seq_id) - fresh(raw, pos, layer)).max()
                assert off <= near, f"layer {il}: keys of sequence {seq_id} at {held} are {off:.1e} off"
                values = np.array([value(token, layer) for _, token in held])
                assert np.array_equal(self.cache.v(il, seq_id), values), f"layer {il}: values of sequence {seq_id}"
        self.cache.check()
        return held


def fresh(raw: F32Array, pos: NDArray[np.int32], layer: LayerSpec) -> F32Array:
    """Return raw keys (n, n_head_kv, n_embd_head_k) as they are written at positions (n,)."""
    if layer.rope is None:
        return raw
    factors = None if layer.rope_factors is None else layer.rope_factors.numpy().ravel()
    return naive_rope(raw, pos, factors=factors, **asdict(layer.rope)).astype(np.float32)


def raw_rows(cache: KVCache) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Return per layer the bytes of K and V, (n_stream * n_cells, bytes of a row); V stored in rows."""
    n = cache.n_cells * cache.n_stream
    pairs = [cache.tensors(il) for il in range(len(cache.spec.layers))]
    return [(k.raw_bytes().reshape(n, -1).copy(), v.raw_bytes().reshape(n, -1).copy()) for k, v in pairs]


def snapshot(cache: KVCache) -> tuple[dict[str, Any], list[bytes]]:
    """Return all that a cache holds, with what is queued carried out."""
    rows = [rows.tobytes() for pair in raw_rows(cache) for rows in pair]
    return state(cache.streams), rows
