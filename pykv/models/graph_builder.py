"""GraphBuilder: what a model file needs to write down its graph, and the graph's own inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykv.batch import UBatch
from pykv.ggml import DType, Graph, GraphInput, Tensor, ops
from pykv.memory import LayerSpec, MassWatch, MemorySpec
from pykv.memory.memory_graph import AttentionGraph, MemoryGraph, MemoryShape, StateGraph
from pykv.models.attention_taps import AttentionTaps
from pykv.typing import AnyArray, BoolArray

Fill = Callable[[AnyArray, UBatch], None]
"""Writes a ubatch's values into the array of an input, numpy's order of dims."""


@dataclass(frozen=True)
class GraphShape:
    """What a graph is built for; it serves every ubatch of equal shape.

    Attributes
    ----------
    memory : what the memory must know; made by its plan.
    n_outputs : tokens whose logits are wanted.
    watches : what is observed.
    from_embeddings : the ubatch brings embeddings instead of tokens.
    is_tapped : what attention gives is shown, see `GraphBuilder.taps`.
    """

    memory: MemoryShape
    n_outputs: int
    watches: tuple[MassWatch, ...] = ()
    from_embeddings: bool = False
    is_tapped: bool = False

    @property
    def n_tokens(self) -> int:
        """Tokens of the ubatch."""
        return self.memory.n_tokens


class GraphBuilder:
    """Builds one graph over one ubatch.

    Activations are `[n_embd, n_tokens]`.

    Attributes
    ----------
    arena : where operations of `pykv.ggml.ops` put their nodes.
    memory : the memory's part of the graph; `kv` and `states` are what a model uses of it.
    taps : shows what attention gives, None where that is not wanted, or no layer attends.
    """

    def __init__(self, graph: Graph, spec: MemorySpec, shape: GraphShape, memory: MemoryGraph) -> None:
        self.graph, self.shape, self.arena = graph, shape, graph.arena
        self.memory, self._spec = memory, spec
        self._inputs: dict[str, tuple[GraphInput, Fill]] = {}
        self.taps: AttentionTaps | None = None

    @property
    def kv(self) -> AttentionGraph:
        """What stores and attends."""
        if self.shape.is_tapped and self.taps is None:
            self.taps = AttentionTaps(self.graph, self.memory.kv)
        return self.taps or self.memory.kv

    @property
    def states(self) -> StateGraph:
        """What keeps recurrent states."""
        return self.memory.states

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The model's layers as its memory knows them, with the rotary settings of this context."""
        return self._spec.layers

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        return tuple(one for one, _ in self._inputs.values()) + self.memory.inputs

    def fill(self, slot: Any, ubatch: UBatch, chosen: Sequence[BoolArray] | None = None) -> None:
        """Write all inputs for a ubatch whose bookkeeping has been applied; see `MemoryGraph.fill`."""
        for one, write in self._inputs.values():
            write(one.array, ubatch)
            one.commit()
        self.memory.fill(slot, ubatch, chosen)

    def input(self, dtype: DType, ne: tuple[int, ...], name: str, fill: Fill) -> Tensor:
        """Return the input of that name; `fill` writes each ubatch's values into its array, numpy's order of dims."""
        if name not in self._inputs:
            self._inputs[name] = GraphInput(self.arena.tensor(dtype, ne, name)), fill
        return self._inputs[name][0].tensor

    # nodes

    @property
    def tokens(self) -> Tensor:
        """The ubatch's token ids, [n_tokens] i32."""
        return self.input(DType.I32, (self.shape.n_tokens,), "tokens", _write_tokens)

    @property
    def positions(self) -> Tensor:
        """The ubatch's positions, [n_tokens * n_pos_per_embd] i32, one axis after the other."""
        n_pos = self._spec.n_pos_per_embd
        return self.input(DType.I32, (self.shape.n_tokens * n_pos,), "positions", _writer_of_positions(n_pos))

    def embed(self, table: Tensor, scale: float = 1.0) -> Tensor:
        """Return the embeddings of the ubatch's tokens, multiplied by `scale`, or those that it brings instead."""
        if self.shape.from_embeddings:
            return self.input(DType.F32, (table.ne[0], self.shape.n_tokens), "embeddings", _write_embeddings)
        x = ops.get_rows(self.arena, table, self.tokens)
        return x if scale == 1.0 else ops.scale(self.arena, x, scale)

    def select_outputs(self, x: Tensor) -> Tensor:
        """Return only the columns whose logits are wanted."""
        n = self.shape.n_outputs
        if not 0 < n < self.shape.n_tokens:
            return x
        return ops.get_rows(self.arena, x, self.input(DType.I32, (n,), "output_ids", _write_output_ids))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return each column, or each head of [head, n_head, n_tokens], normalised and scaled."""
        return ops.mul(self.arena, ops.rms_norm(self.arena, x, eps), weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return weight · x, plus bias."""
        out = ops.mul_mat(self.arena, weight, x)
        return out if bias is None else ops.add(self.arena, out, bias)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return ops.add(self.arena, a, b)

    def heads(self, x: Tensor, head: int) -> Tensor:
        """Return [n_head * head, n_tokens] as [head, n_head, n_tokens]."""
        return ops.reshape(self.arena, x, head, x.ne[0] // head, x.ne[1])

    def rope(self, il: int, x: Tensor) -> Tensor:
        """Rotate the heads [head, n_head, n_tokens] by the tokens' positions, as layer `il` does.

        What `rope_at` leaves alone is not part of `x`.
        """
        layer = self._spec.layers[il]
        if layer.rope is None:
            return x
        return ops.rope(self.arena, x, self.positions, layer.rope, layer.rope_factors)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.swiglu(self.arena, gate, up)

    def attend(self, il: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Return what the queries see, [Dv * H, n_tokens]; `sinks` [H] f32 as in `AttentionParams`."""
        out = self.kv.attend(il, q, scale, sinks)
        return ops.reshape(self.arena, out, out.ne[0] * out.ne[1], out.ne[2])

    def observe(self, il: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> None:
        """Let a layer whose outputs nobody needs be observed, if it is to be."""
        if self.kv.observes(il):
            self.kv.attend(il, q, scale, sinks)


def _write_tokens(array: AnyArray, ubatch: UBatch) -> None:
    array[0, 0, 0] = ubatch.token


def _write_embeddings(array: AnyArray, ubatch: UBatch) -> None:
    array[0, 0] = ubatch.embd


def _write_output_ids(array: AnyArray, ubatch: UBatch) -> None:
    array[0, 0, 0] = np.flatnonzero(ubatch.output)


def _writer_of_positions(n_pos: int) -> Fill:
    def write(array: AnyArray, ubatch: UBatch) -> None:
        axes = array[0, 0, 0].reshape(n_pos, -1)
        if n_pos == 1 or ubatch.token is None:
            axes[:] = ubatch.pos
        else:  # text among pictures: time, row and column are one, the fourth axis is not used
            axes[:3], axes[3:] = ubatch.pos[0], 0

    return write
