"""Attention mass in a KV cache without a model, and the same in plain numpy, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from support import on_device
from support.kv_scene import Token, plan_batch
from support.naive_attention import alibi_slope

from pykv.batch import UBatch
from pykv.cells import SlotInfo
from pykv.ggml import Arena, DType, Graph, GraphInput
from pykv.memory import AttentionMass, AttentionPath, KVCache, KVGraph, KVShape, MassWatch

F64Array = NDArray[np.float64]


def share(cache: KVCache, q: F64Array, pos: int, seen: list[tuple[int, F64Array]]) -> F64Array:
    """Return (n_head, n_seen) how much of each key a query (n_head, Dk) takes; keys (n_head_kv, Dk) with positions."""
    spec, n_head = cache.spec, len(q)
    out = np.zeros((n_head, len(seen)))
    for head, one in enumerate(q):
        for i, (p0, k) in enumerate(seen):
            score = float(one @ k[head // (n_head // len(k))]) / math.sqrt(q.shape[1])
            if spec.logit_softcap:
                score = spec.logit_softcap * math.tanh(score / spec.logit_softcap)
            bias = alibi_slope(head, n_head, spec.alibi_max_bias) * abs(pos - p0) if spec.alibi_max_bias else 0.0
            out[head, i] = score - bias
    out = np.exp(out - out.max(axis=1, keepdims=True))
    return out / out.sum(axis=1, keepdims=True)


def expected_mass(shares: list[F64Array], what: AttentionMass, n_head_kv: int) -> F64Array:
    """Return (n_head_kv or 1, n_kv) of the shares (n_head, n_kv) of the queries that count."""
    n_head, n_kv = shares[0].shape
    groups = n_head_kv if what.per_kv_head else 1
    out = np.zeros((groups, n_kv))
    for one in shares:
        for head in range(n_head) if what.heads is None else what.heads:
            row = out[head // (n_head // groups)]
            row[:] = np.maximum(row, one[head]) if what.largest else row + one[head]
    return out


class MassScene:
    """Random keys and queries in layer 0 of a cache, and every key again as a float64 row."""

    def __init__(self, cache: KVCache, path: AttentionPath, n_head: int, seed: int = 0) -> None:
        self.cache, self.path, self.n_head = cache, path, n_head
        self._rng = np.random.default_rng(seed)
        self._keys: list[tuple[int, int, tuple[int, ...], int, F64Array]] = []
        self.out: NDArray[np.float32] | None = None

    def step(
        self, tokens: Sequence[Token], what: AttentionMass, n_ubatch: int = 512
    ) -> list[tuple[NDArray[np.float32], F64Array]]:
        """Store tokens; returns per ubatch (ours, numpy's) masses (n_stream, n_head_kv or 1, n_kv)."""
        plan = plan_batch(self.cache, tokens, n_ubatch)
        assert plan is not None
        return [self._ubatch(plan.apply(i), plan.slots[i], u, what) for i, u in enumerate(plan.ubatches)]

    def _ubatch(
        self, shape: KVShape, slot: SlotInfo, ubatch: UBatch, what: AttentionMass
    ) -> tuple[NDArray[np.float32], F64Array]:
        layer, n = self.cache.spec.layers[0], ubatch.n_tokens
        q = self._rng.standard_normal((n, self.n_head, layer.n_embd_head_k)).astype(np.float32)
        k = self._rng.standard_normal((n, layer.n_head_kv, layer.n_embd_head_k)).astype(np.float32)
        v = self._rng.standard_normal((n, layer.n_head_kv, layer.n_embd_head_v)).astype(np.float32)
        per_stream = slot.idxs.shape[1]
        for i, (ids, p) in enumerate(zip(ubatch.seq_ids, ubatch.pos[0].tolist(), strict=True)):
            stream, cell = slot.streams[i // per_stream], int(slot.idxs[i // per_stream, i % per_stream])
            self._keys.append((stream, cell, ids, p, k[i].astype(np.float64)))
        ours = self._computed(shape, slot, ubatch, what, (q, k, v))
        theirs = []
        for number, stream in enumerate(slot.streams):
            rows = range(number * per_stream, (number + 1) * per_stream)
            counted = [i for i in rows if what.last is None or self._is_late(ubatch, i, what.last)]
            shares = [self._share_of_cells(stream, ubatch, i, q[i].astype(np.float64), shape.n_kv) for i in counted]
            theirs.append(expected_mass(shares, what, layer.n_head_kv))
        return ours, np.array(theirs)

    @staticmethod
    def _is_late(ubatch: UBatch, i: int, last: int) -> bool:
        """Whether fewer than `last` tokens of one of its sequences come after token `i`."""
        later = [[j for j in range(i + 1, ubatch.n_tokens) if s in ubatch.seq_ids[j]] for s in ubatch.seq_ids[i]]
        return any(len(one) < last for one in later)

    def _share_of_cells(self, stream: int, ubatch: UBatch, i: int, q: F64Array, n_kv: int) -> F64Array:
        seq, pos, window = int(ubatch.seq_first[i]), int(ubatch.pos[0, i]), self.cache.spec.window
        seen = [
            (cell, p, k)
            for s, cell, ids, p, k in self._keys
            if s == stream and seq in ids and p <= pos and not window.masked(p, pos)
        ]
        out = np.zeros((self.n_head, n_kv))
        out[:, [cell for cell, _, _ in seen]] = share(self.cache, q, pos, [(p, k) for _, p, k in seen])
        return out

    def _computed(self, shape, slot, ubatch, what, qkv) -> NDArray[np.float32]:
        graph = Graph(Arena(96, 96))
        rows = ubatch.n_tokens // shape.n_stream
        n_rows = rows if what.last is None else min(rows, what.last * len({s for ids in ubatch.seq_ids for s in ids}))
        watches = [MassWatch(frozenset({0}), what, n_rows)]
        kv = KVGraph(graph, self.cache, shape, self.path, watches=watches)
        given = [GraphInput(graph.arena.tensor(DType.F32, x.shape[::-1])) for x in qkv]
        kv.store(0, given[1].tensor, given[2].tensor)
        out = kv.attend(0, given[0].tensor, float(1 / np.sqrt(qkv[0].shape[2]))).as_output()
        graph.expand(out)
        with on_device.sched(96, [*self.cache.owners, graph.arena]) as sched:
            sched.allocate(graph)
            for one in (*given, *kv.inputs):
                one.bind()
            for one, x in zip(given, qkv, strict=True):
                one.array[0] = x
                one.commit()
            kv.fill(slot, ubatch)
            sched.compute(graph)
            self.out = out.numpy()[0]
            return kv.masses[0][0].numpy()[0]
