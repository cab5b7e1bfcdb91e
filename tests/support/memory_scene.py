"""Known keys and values in a memory of any kind with attention, and the same as plain lists: no model, no cells.

Each token has raw keys and values of its own. What a sequence believes to hold is `NaiveSequences`; attention over
that, with keys rotated to where the tokens stand now, is what every layer must give.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from support import on_device
from support.kv_scene import Token, plan_batch
from support.naive_attention import dense_attention
from support.naive_sequences import Held, NaiveSequences
from support.row_writer import Pair, draw, rotated

from pykv.batch import UBatch
from pykv.ggml import Arena, DType, Graph, GraphInput
from pykv.memory import AttentionPath, AttentionPlan, Memory

Array = NDArray[np.float32]
N_HEAD = 2


class MemoryScene:
    """Decodes into a memory and looks back through it.

    Attributes
    ----------
    naive : what each sequence holds.
    raw : per token, the raw key and the value of each layer.

    Parameters
    ----------
    key : the raw key of every token; empty = random ones.
    """

    def __init__(
        self, memory: Memory, path: AttentionPath = AttentionPath.GROUPED, seed: int = 0, key: Sequence[float] = ()
    ) -> None:
        self.memory, self.plan, self._key = memory, AttentionPlan.of(path), key
        self.naive = NaiveSequences(memory.n_seq_max, memory.n_cells, memory.n_stream == 1)
        self.raw: list[list[Pair]] = []
        self._rng = np.random.default_rng(seed)
        self._layers = [il for il, layer in enumerate(memory.spec.layers) if layer.n_head_kv]

    def edit(self, verb: str, *args: int) -> None:
        """Tell the memory and the lists."""
        getattr(self.memory, verb)(*args)
        getattr(self.naive, verb)(*args)

    def step(self, tokens: Sequence[Token], n_ubatch: int = 4) -> float:
        """Store tokens and attend; returns how far the farthest layer's outputs are from those over the lists."""
        plan = plan_batch(self.memory, tokens, n_ubatch)
        assert plan is not None, f"no room for {tokens}: {self.memory.used}"
        fresh, first = draw(self.memory.spec, len(tokens), self._rng), len(self.raw)
        if self._key:
            fresh = [(np.broadcast_to(np.array(self._key, np.float32), k.shape), v) for k, v in fresh]
        self.raw += [[(k[i], v[i]) for k, v in fresh] for i in range(len(tokens))]
        off = 0.0
        for i, ubatch in enumerate(plan.ubatches):
            ids = (first + ubatch.batch_idxs).tolist()
            for token, seqs, pos in zip(ids, ubatch.seq_ids, ubatch.pos[0].tolist(), strict=True):
                one = Held(pos, token)
                for s in seqs:
                    self.naive.held[s].append(one)
            queries = [self._draw_queries(len(ids), il) for il in self._layers]
            found = self._run(plan.apply(i), plan.slots[i], ubatch, ids, queries)
            expected = [self._expected(il, ubatch, q) for il, q in zip(self._layers, queries, strict=True)]
            off = max(off, *(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)))
        return off

    def _draw_queries(self, n: int, il: int) -> Array:
        head = self.memory.spec.layers[il].n_embd_head_k
        return self._rng.uniform(-2, 2, (n, N_HEAD, head)).astype(np.float32)

    def _run(self, shape: object, slot: object, ubatch: UBatch, ids: list[int], queries: list[Array]) -> list[Array]:
        """Compute one graph that stores in all layers and attends."""
        spec = self.memory.spec
        graph = Graph(Arena(64 * len(spec.layers) + 64, 64 * len(spec.layers) + 64))
        part = self.memory.graph(graph, shape, self.plan)
        given: list[tuple[GraphInput, Array]] = []

        def known(x: Array, name: str) -> GraphInput:
            one = GraphInput(graph.arena.tensor(DType.F32, x.shape[::-1], name))
            given.append((one, x.astype(np.float32)))
            return one

        outs = []
        for il, q in zip(self._layers, queries, strict=True):
            k = rotated(spec.layers[il], np.array([self.raw[token][il][0] for token in ids]), ubatch.pos[0])
            v = np.array([self.raw[token][il][1] for token in ids])
            part.kv.store(il, known(k, f"k{il}").tensor, known(v, f"v{il}").tensor)
            outs.append(part.kv.attend(il, known(q, f"q{il}").tensor, 1.0).as_output())
            graph.expand(outs[-1])
        with on_device.sched(64 * len(spec.layers) + 64, [*self.memory.owners, graph.arena]) as sched:
            sched.allocate(graph)
            for one in (*(one for one, _ in given), *part.inputs):
                one.bind()
            for one, x in given:
                one.array[0] = x
                one.commit()
            part.fill(slot, ubatch)
            sched.compute(graph)
            return [out.numpy()[0] for out in outs]

    def _expected(self, il: int, ubatch: UBatch, q: Array) -> NDArray[np.float64]:
        spec = self.memory.spec
        layer = spec.layers[il]
        out = []
        for one, ids, p in zip(q, ubatch.seq_ids, ubatch.pos[0].tolist(), strict=True):
            held = [h for h in self.naive.held[ids[0]] if h.pos <= p]
            if layer.is_swa:
                held = [h for h in held if not spec.window.masked(h.pos, p)]
            k = rotated(layer, np.array([self.raw[h.token][il][0] for h in held]), [h.pos for h in held])
            v = np.array([self.raw[h.token][il][1] for h in held])
            out.append(dense_attention(one[None, None], k[None], v[None], None, scale=1.0)[0, 0])
        return np.array(out)
