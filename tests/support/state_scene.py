"""A memory with states in use without a model: a graph that computes h = 2h + token, and the same in plain Python.

Layers with K and V store each token as its key and as its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support import on_device

from pykv.batch import Batch, BatchLimits, UBatch, ValidBatch, validate
from pykv.cells import NO_WINDOW, Window
from pykv.ggml import Arena, DType, Graph, GraphInput, Tensor, ops
from pykv.memory import AttentionPath, AttentionPlan, LayerSpec, MemorySpec, RecurrentMemory, StateSpec
from pykv.memory.base import MemoryContext
from pykv.memory.hybrid import HybridMemory
from pykv.memory.memory_graph import AttentionGraph, StateGraph

N_RECENT = 3
"""Tokens in the row of recent inputs."""

FACTORS = np.array([1, -1], np.float32)
"""What the two elements of a state multiply each token by."""

HEAD = 4
"""Elements of a key and of a value; each is the token."""

N_NODES = 1024

Token = tuple[int | tuple[int, ...], int]
"""Sequence ids and the token."""


def state_spec(n_layer: int = 2) -> MemorySpec:
    """Return layers with a row of recent tokens and a state of two elements."""
    return MemorySpec.uniform(n_layer, LayerSpec.recurrent(StateSpec(N_RECENT, len(FACTORS))))


def hybrid_spec(window: Window = NO_WINDOW, n_dense: int = 1) -> MemorySpec:
    """Return a layer with K, V and a state, one with a state alone, and one with K and V, windowed if there is one.

    Without `n_dense` the first layer has the window too.
    """
    state, windowed = StateSpec(N_RECENT, len(FACTORS)), window is not NO_WINDOW
    both = LayerSpec(1, HEAD, HEAD, state=state, is_swa=windowed and not n_dense)
    return MemorySpec((both, LayerSpec.recurrent(state), LayerSpec(2, HEAD, HEAD, is_swa=windowed)), window)


def state_after(tokens: Sequence[int]) -> int:
    """Return h after some tokens, from 0 on."""
    return reduce(lambda h, token: 2 * h + token, tokens, 0)


def recent_after(tokens: Sequence[int]) -> list[int]:
    """Return the row of recent inputs after some tokens, oldest first, zeros before them."""
    return ([0] * N_RECENT + list(tokens))[-N_RECENT:]


@dataclass
class StateScene:
    """What sequences hold, and decodes into a memory that must agree.

    Attributes
    ----------
    tokens : per sequence, all tokens that are in its state.
    """

    memory: RecurrentMemory | HybridMemory
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def decode(self, batch: Sequence[Token], n_ubatch: int = 64) -> None:
        """Compute a batch that goes on where its sequences end; every result must be that of plain Python."""
        plan = self.plan(batch, n_ubatch)
        for i, ubatch in enumerate(plan.ubatches):
            assert ubatch.n_tokens <= n_ubatch
            given = run_states(self.memory, plan.apply(i), plan.slots[i], ubatch)
            assert given == [self._take(ubatch, t) for t in range(ubatch.n_tokens)]

    def plan(self, batch: Sequence[Token], n_ubatch: int = 64) -> MemoryContext:
        """Find room for a batch that goes on where its sequences end."""
        plan = self.memory.init_batch(self.valid(batch), n_ubatch)
        assert plan is not None
        return plan

    def valid(self, batch: Sequence[Token]) -> ValidBatch:
        """Return a batch that goes on where its sequences end."""
        ends = {s: len(tokens) for s, tokens in self.tokens.items()}
        pos = []
        for ids, _ in batch:
            each = (ids,) if isinstance(ids, int) else ids
            pos.append(ends.get(each[0], 0))
            ends |= dict.fromkeys(each, pos[-1] + 1)
        written = Batch([t for _, t in batch], pos=pos, seq_id=[ids for ids, _ in batch])
        limits = BatchLimits(n_tokens_max=4096, n_vocab=1000, n_seq_max=self.memory.n_seq_max)
        return validate(written, limits, self.memory)

    def _take(self, ubatch: UBatch, t: int) -> int:
        """Let the sequences of a token hold it; returns h behind it."""
        assert ubatch.token is not None
        held = [*self.tokens.get(ubatch.seq_ids[t][0], ()), int(ubatch.token[t])]
        self.tokens |= {s: list(held) for s in ubatch.seq_ids[t]}
        return state_after(held)

    def check(self) -> None:
        """Compare positions and rows of every sequence in every layer."""
        memory = self.memory
        memory.check()
        for s in range(memory.n_seq_max):
            tokens = self.tokens.get(s, [])
            assert memory.pos_max(s) == memory.pos_min(s) == len(tokens) - 1
            for il, layer in enumerate(memory.spec.layers if tokens else ()):
                if layer.state is not None:
                    assert memory.s(il, s).tolist() == (state_after(tokens) * FACTORS).tolist()
                    assert memory.r(il, s).tolist() == recent_after(tokens)
                if layer.n_head_kv:
                    self._check_keys(il, s)

    def _check_keys(self, il: int, s: int) -> None:
        """Compare the keys and values that a next token sees."""
        memory, tokens = self.memory, np.array(self.tokens[s])
        n_seen = memory.spec.window.n_swa - 1 if memory.spec.layers[il].is_swa else len(tokens)
        n_seen = min(n_seen, len(tokens))
        assert sorted(memory.seen(s, il)[0].tolist()) == list(range(len(tokens) - n_seen, len(tokens)))
        for rows in (memory.k(il, s)[-n_seen:], memory.v(il, s)[-n_seen:]):
            assert np.array_equal(rows, np.broadcast_to(tokens[-n_seen:, None, None], rows.shape))


def spoil(memory: RecurrentMemory | HybridMemory, rows: Sequence[int] | None = None) -> None:
    """Write NaN into rows of states, all of them if none are named, as if nothing in there were a number."""
    states = memory if isinstance(memory, RecurrentMemory) else memory.recurrent
    for layer in states.plan.layers:
        for tensor in states.tensors(layer.il):
            assert tensor is not None
            for row in range(tensor.ne[1]) if rows is None else rows:
                tensor.set(np.full(tensor.ne[0], np.nan, np.float32), row * 4 * tensor.ne[0])


def run_states(memory: RecurrentMemory | HybridMemory, shape: Any, slot: Any, ubatch: UBatch) -> list[int]:
    """Compute one ubatch; returns h behind each token, which must be the same in every layer with a state."""
    graph = Graph(Arena(N_NODES, N_NODES))
    part = memory.graph(graph, shape, AttentionPlan.of(AttentionPath.FLASH))
    n, n_seqs = part.states.n_seq_tokens, part.states.n_seqs
    given = GraphInput(graph.arena.tensor(DType.F32, (1, n, n_seqs), "tokens"))
    factors = GraphInput(graph.arena.tensor(DType.F32, (len(FACTORS),), "factors"))
    outs = []
    for il, layer in enumerate(memory.spec.layers):
        if layer.n_head_kv:
            _store(graph, part.kv, il, layer.n_head_kv, given.tensor)
        if layer.state is not None:
            outs.append(_advance(graph, part.states, il, given.tensor, factors.tensor))
            graph.expand(outs[-1].as_output())
    with on_device.sched(N_NODES, [*memory.owners, graph.arena]) as sched:
        sched.allocate(graph)
        for one in (given, factors, *part.inputs):
            one.bind()
        given.array[0, :, :, 0] = np.asarray(ubatch.token).reshape(n_seqs, n)
        factors.array[0, 0, 0] = FACTORS
        part.fill(slot, ubatch)
        sched.compute(graph)
        results: list[NDArray[np.float32]] = [out.numpy()[:, :, 0] for out in outs]
    for result in results:
        assert np.array_equal(result[..., 1], -result[..., 0])
        assert np.array_equal(result, results[0])
    return results[0].transpose(1, 0, 2)[..., 0].reshape(-1).astype(int).tolist()


def _store(graph: Graph, kv: AttentionGraph, il: int, n_head_kv: int, tokens: Tensor) -> None:
    """Store each token as its key and its value."""
    n_tokens = tokens.ne[1] * tokens.ne[2]
    rows = ops.reshape(graph.arena, tokens, 1, 1, n_tokens)
    rows = ops.repeat(graph.arena, rows, HEAD, n_head_kv, n_tokens)
    kv.store(il, rows, rows)


def _advance(graph: Graph, part: StateGraph, il: int, tokens: Tensor, factors: Tensor) -> Tensor:
    """Add one layer; returns the states behind each token, [2, 1, n_seqs, n_tokens]."""
    arena, n, n_seqs = graph.arena, part.n_seq_tokens, part.n_seqs
    line = ops.concat(arena, ops.reshape(arena, part.read_r(il), 1, N_RECENT, n_seqs), tokens, 1)
    seq = line.nb[2]

    def recent(d: int) -> Tensor:
        return ops.view(arena, line, (1, N_RECENT, n_seqs, 1), (4, seq, seq * n_seqs), 4 * (n - d))

    part.write_r(il, [recent(d) for d in range(part.n_planes)])
    states = [ops.reshape(arena, part.read_s(il), len(FACTORS), 1, n_seqs)]
    for t in range(n):
        token = ops.view(arena, tokens, (1, 1, n_seqs, 1), (4, tokens.nb[2], tokens.nb[2] * n_seqs), 4 * t)
        step = ops.mul(arena, ops.repeat(arena, ops.cont(arena, token), len(FACTORS), 1, n_seqs), factors)
        states.append(ops.add(arena, ops.scale(arena, states[-1], 2.0), step))

    def joined(parts: list[Tensor]) -> Tensor:
        return reduce(lambda a, b: ops.concat(arena, a, b, 3), parts)

    part.write_s(il, joined(states[: -part.n_planes - 1 : -1]))
    return joined(states[1:])
