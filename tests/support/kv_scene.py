"""A KV cache in use without a model: a graph that only stores given keys and values, and attends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support import on_device
from support.naive_attention import NaiveKV

from pykv.batch import Batch, BatchLimits, UBatch, validate
from pykv.cells import SlotInfo
from pykv.ggml import Arena, DType, Graph, GraphInput
from pykv.memory import AttentionPath, KVCache, KVGraph, KVShape, Memory

F32Array = NDArray[np.float32]
Token = tuple[int | tuple[int, ...], int]
"""Sequence ids and position."""


def plan_batch(cache: Memory, tokens: Sequence[Token], n_ubatch: int = 512) -> Any:
    """Check a batch against a memory and find room for it; None if there is none."""
    batch = Batch([1] * len(tokens), pos=[p for _, p in tokens], seq_id=[ids for ids, _ in tokens])
    n_pos = cache.spec.n_pos_per_embd
    limits = BatchLimits(n_tokens_max=4096, n_vocab=2, n_seq_max=cache.n_seq_max, n_pos_per_embd=n_pos)
    return cache.init_batch(validate(batch, limits, cache), n_ubatch)


def store_positions(cache: Memory, tokens: Sequence[Token], n_ubatch: int = 512) -> None:
    """Write only the bookkeeping of some tokens."""
    plan = plan_batch(cache, tokens, n_ubatch)
    assert plan is not None, f"no room for {tokens}"
    for i in range(len(plan.ubatches)):
        plan.apply(i)


def run(seq: int | tuple[int, ...], positions: Iterable[int]) -> list[Token]:
    """Return tokens of one sequence."""
    return [(seq, p) for p in positions]


class KVScene:
    """Random keys, values and queries in a cache, and the same in `NaiveKV`, layer by layer."""

    def __init__(self, cache: KVCache, path: AttentionPath, n_head: int, seed: int = 0) -> None:
        self.cache, self.path, self.n_head = cache, path, n_head
        self.scale = 1 / np.sqrt(cache.spec.layers[0].n_embd_head_k)
        spec = cache.spec
        self.naive = [
            NaiveKV(
                self.scale,
                spec.alibi_max_bias,
                spec.logit_softcap,
                lambda p0, p1: bool(spec.window.masked(p0, p1)),
            )
            for _ in spec.layers
        ]
        self._rng = np.random.default_rng(seed)
        self.last_k: dict[int, F32Array] = {}

    def step(self, tokens: Sequence[Token], n_ubatch: int = 512) -> list[tuple[F32Array, F32Array]]:
        """Store tokens and attend; returns per layer (ours, numpy's), each (n_tokens, n_head, Dv)."""
        plan = plan_batch(self.cache, tokens, n_ubatch)
        assert plan is not None, f"no room for {tokens}"
        results: list[tuple[list[F32Array], list[F32Array]]] = [([], []) for _ in self.cache.spec.layers]
        for i, ubatch in enumerate(plan.ubatches):
            shape = plan.apply(i)
            for il in range(len(self.cache.spec.layers)):
                ours, theirs = self._layer(il, shape, plan.slots[i], ubatch)
                results[il][0].append(ours)
                results[il][1].append(theirs)
        return [(np.concatenate(ours), np.concatenate(theirs)) for ours, theirs in results]

    def _layer(self, il: int, shape: KVShape, slot: SlotInfo, ubatch: UBatch) -> tuple[F32Array, F32Array]:
        layer, n = self.cache.spec.layers[il], ubatch.n_tokens
        q = self._draw(n, self.n_head, layer.n_embd_head_k)
        k = self._draw(n, layer.n_head_kv, layer.n_embd_head_k)
        v = k[:, :, : layer.n_embd_head_v] if layer.k_only else self._draw(n, layer.n_head_kv, layer.n_embd_head_v)
        self.last_k[il] = k
        naive = self.naive[il]
        for ids, p, one_k, one_v in zip(ubatch.seq_ids, ubatch.pos[0].tolist(), k, v, strict=True):
            naive.store(ids, p, one_k, one_v)
        expected = [
            naive.attend(int(s), int(p), one) for s, p, one in zip(ubatch.seq_first, ubatch.pos[0], q, strict=True)
        ]
        return run_layer(self.cache, self.path, il, (shape, slot, ubatch), (q, k, v)), np.array(expected)

    def _draw(self, *shape: int) -> F32Array:
        return self._rng.standard_normal(shape).astype(np.float32)


def run_layer(
    cache: KVCache,
    path: AttentionPath,
    il: int,
    where: tuple[KVShape, SlotInfo, UBatch],
    qkv: tuple[F32Array, F32Array, F32Array],
) -> F32Array:
    """Build and compute a graph of one layer: store, attend. Returns (n_tokens, n_head, Dv)."""
    shape, slot, ubatch = where
    graph = Graph(Arena(96, 96))
    kv = KVGraph(graph, cache, shape, path)
    arrays = qkv[:2] if cache.spec.layers[il].k_only else qkv
    given = [GraphInput(graph.arena.tensor(DType.F32, x.shape[::-1], f"x{i}")) for i, x in enumerate(arrays)]
    kv.store(il, *(one.tensor for one in given[1:]))
    out = kv.attend(il, given[0].tensor, float(1 / np.sqrt(qkv[0].shape[2]))).as_output()
    graph.expand(out)
    with on_device.sched(96, [*cache.owners, graph.arena]) as sched:
        sched.allocate(graph)
        for one in (*given, *kv.inputs):
            one.bind()
        for one, x in zip(given, arrays, strict=True):
            one.array[0] = x
            one.commit()
        kv.fill(slot, ubatch)
        sched.compute(graph)
        return out.numpy()[0]
