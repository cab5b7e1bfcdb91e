"""GraphBuilder: what a model file needs to write down its graph, and the graph's own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pykv.batch import UBatch
from pykv.cells import SlotInfo
from pykv.ggml import DType, Graph, GraphInput, Tensor, ops
from pykv.memory import AttentionPath, KVCache, KVGraph, KVShape, MassWatch
from pykv.typing import BoolArray


@dataclass(frozen=True)
class GraphShape:
    """What a graph is built for; it serves every ubatch of equal shape."""

    kv: KVShape
    n_outputs: int
    watches: tuple[MassWatch, ...] = ()


class GraphBuilder:
    """Builds one graph over one ubatch.

    Activations are `[n_embd, n_tokens]`. `kv` stores and attends.
    """

    def __init__(self, graph: Graph, cache: KVCache, shape: GraphShape, path: AttentionPath) -> None:
        self.graph, self.shape = graph, shape
        self._arena = graph.arena
        self._spec = cache.spec
        self.kv = KVGraph(graph, cache, shape.kv, path, watches=shape.watches)
        n = shape.kv.n_tokens
        self._token = GraphInput(self._arena.tensor(DType.I32, (n,), "tokens"))
        self._pos = GraphInput(self._arena.tensor(DType.I32, (n,), "positions"))
        self._out_ids = None
        if 0 < shape.n_outputs < n:
            self._out_ids = GraphInput(self._arena.tensor(DType.I32, (shape.n_outputs,), "output_ids"))

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        own = (self._token, self._pos, self._out_ids)
        return tuple(i for i in own if i is not None) + self.kv.inputs

    def fill(self, slot: SlotInfo, ubatch: UBatch, chosen: Sequence[BoolArray] | None = None) -> None:
        """Write all inputs for a ubatch whose bookkeeping has been applied; `chosen` as in `KVGraph.fill`."""
        self._token.array[0, 0, 0] = ubatch.token
        self._pos.array[0, 0, 0] = ubatch.pos[0]
        self._token.commit()
        self._pos.commit()
        if self._out_ids is not None:
            self._out_ids.array[0, 0, 0] = np.flatnonzero(ubatch.output)
            self._out_ids.commit()
        self.kv.fill(slot, ubatch, chosen)

    # nodes

    def embed(self, table: Tensor) -> Tensor:
        """Return the embeddings of the ubatch's tokens."""
        return ops.get_rows(self._arena, table, self._token.tensor)

    def select_outputs(self, x: Tensor) -> Tensor:
        """Return only the columns whose logits are wanted."""
        return x if self._out_ids is None else ops.get_rows(self._arena, x, self._out_ids.tensor)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return each column, or each head of [head, n_head, n_tokens], normalised and scaled."""
        return ops.mul(self._arena, ops.rms_norm(self._arena, x, eps), weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return weight · x, plus bias."""
        out = ops.mul_mat(self._arena, weight, x)
        return out if bias is None else ops.add(self._arena, out, bias)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return ops.add(self._arena, a, b)

    def heads(self, x: Tensor, head: int) -> Tensor:
        """Return [n_head * head, n_tokens] as [head, n_head, n_tokens]."""
        return ops.reshape(self._arena, x, head, x.ne[0] // head, x.ne[1])

    def rope(self, il: int, x: Tensor) -> Tensor:
        """Rotate the heads [head, n_head, n_tokens] by the tokens' positions, as layer `il` does."""
        layer = self._spec.layers[il]
        if layer.rope is None:
            return x
        return ops.rope(self._arena, x, self._pos.tensor, layer.rope, layer.rope_factors)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.swiglu(self._arena, gate, up)

    def attend(self, il: int, q: Tensor, scale: float) -> Tensor:
        """Return what the queries see, [Dv * H, n_tokens]."""
        out = self.kv.attend(il, q, scale)
        return ops.reshape(self._arena, out, out.ne[0] * out.ne[1], out.ne[2])

    def observe(self, il: int, q: Tensor, scale: float) -> None:
        """Let a layer whose outputs nobody needs be observed, if it is to be."""
        if self.kv.observes(il):
            self.kv.attend(il, q, scale)
