"""The part of a model's graph that belongs to recurrent states: gather them, zero them, put them back.

Which rows are read and written is input, so that one graph serves every ubatch of equal shape.
Source: spec iswa_recurrent_hybrid.md section 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykv.batch import UBatch
from pykv.cells import RecurrentSlot
from pykv.errors import ParamError
from pykv.ggml import DType, Graph, GraphInput, Tensor, ops
from pykv.memory.memory_graph import MemoryGraph
from pykv.typing import BoolArray

if TYPE_CHECKING:
    from pykv.memory.recurrent import RecurrentMemory


@dataclass(frozen=True)
class StateShape:
    """What a graph is built for; it serves every ubatch of equal shape.

    Attributes
    ----------
    n_tokens : tokens of the ubatch.
    n_seqs : sequence sets of the ubatch.
    n_extra : states of others that move out of the way.
    has_fresh : some sequence begins, from zeros.
    """

    n_tokens: int
    n_seqs: int
    n_extra: int
    has_fresh: bool


class RecurrentGraph(MemoryGraph):
    """Nodes and inputs of one recurrent memory in one graph."""

    def __init__(self, graph: Graph, memory: RecurrentMemory, shape: StateShape) -> None:
        self._graph, self._arena = graph, graph.arena
        self._memory, self.shape = memory, shape
        self._indices: dict[str, GraphInput] = {}
        self._zeros: GraphInput | None = None

    @property
    def states(self) -> RecurrentGraph:
        """The graph itself."""
        return self

    @property
    def n_seqs(self) -> int:
        """Sequence sets of the ubatch."""
        return self.shape.n_seqs

    @property
    def n_seq_tokens(self) -> int:
        """Tokens of each set."""
        return self.shape.n_tokens // self.shape.n_seqs

    @property
    def n_planes(self) -> int:
        """States that the ubatch leaves of each sequence: the latest, and those so many tokens earlier."""
        return min(self.n_seq_tokens, 1 + self._memory.n_rs_seq)

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes, each once."""
        return (*self._indices.values(), *(() if self._zeros is None else (self._zeros,)))

    def fill(self, slot: RecurrentSlot, ubatch: UBatch, chosen: BoolArray | None = None) -> None:
        """See `MemoryGraph.fill`."""
        n, own = slot.n_seqs, np.arange(slot.head, slot.head + slot.n)
        rows = {"read": slot.s_copy[:n], "read_extra": slot.s_copy[n:], "write_extra": own[n:], "fresh": [slot.rs_z]}
        rows |= {f"write_{d}": own[:n] + d * self._memory.n_cells for d in range(self.n_planes)}
        for name, index in self._indices.items():
            index.array[0, 0, 0] = rows[name]
        if self._zeros is not None:
            self._zeros.array[...] = 0
        for one in self.inputs:
            one.commit()

    def read_r(self, il: int) -> Tensor:
        """Return the rows of recent inputs before the ubatch, [n_embd_r, n_seqs] f32."""
        return self._read(self._stored(il, 0))

    def read_s(self, il: int) -> Tensor:
        """Return the states before the ubatch, [n_embd_s, n_seqs] f32."""
        return self._read(self._stored(il, 1))

    def write_r(self, il: int, rows: Tensor, plane: int = 0) -> None:
        """Add nodes that store [n_embd_r, n_seqs]: the rows after the ubatch, less its last `plane` tokens."""
        self._write(self._stored(il, 0), rows, plane)

    def write_s(self, il: int, states: Tensor, plane: int = 0) -> None:
        """Add nodes that store [n_embd_s, n_seqs]: the states after the ubatch, less its last `plane` tokens."""
        self._write(self._stored(il, 1), states, plane)

    # mechanism

    def _stored(self, il: int, which: int) -> Tensor:
        tensor = self._memory.tensors(il)[which]
        if tensor is None:
            raise ParamError(f"il={il}: this layer has no {'rs'[which]} state")
        return tensor

    def _read(self, stored: Tensor) -> Tensor:
        """Return the rows that the ubatch continues; rows that move out of the way do so once these are read."""
        shape = self.shape
        if shape.has_fresh:
            zeros = self._zero_row(stored.ne[0])
            self._graph.expand(ops.set_rows(self._arena, stored, zeros, self._index("fresh", 1, DType.I64)))
        rows = ops.get_rows(self._arena, stored, self._index("read", shape.n_seqs, DType.I32))
        self._graph.expand(rows)
        if shape.n_extra:
            extra = ops.get_rows(self._arena, stored, self._index("read_extra", shape.n_extra, DType.I32))
            self._graph.expand(extra)
            to = self._index("write_extra", shape.n_extra, DType.I64)
            self._graph.expand(ops.set_rows(self._arena, stored, extra, to))
        return rows

    def _write(self, stored: Tensor, rows: Tensor, plane: int) -> None:
        if not 0 <= plane < self.n_planes:
            raise ParamError(f"plane={plane}: the ubatch leaves {self.n_planes} states of each sequence")
        if not rows.is_contiguous:
            rows = ops.cont(self._arena, rows)
        rows = ops.reshape(self._arena, rows, stored.ne[0], self.shape.n_seqs)
        to = self._index(f"write_{plane}", self.shape.n_seqs, DType.I64)
        self._graph.expand(ops.set_rows(self._arena, stored, rows, to))

    def _index(self, name: str, n: int, dtype: DType) -> Tensor:
        if name not in self._indices:
            self._indices[name] = GraphInput(self._arena.tensor(dtype, (n,), f"state_{name}"))
        return self._indices[name].tensor

    def _zero_row(self, width: int) -> Tensor:
        if self._zeros is None:
            widest = max(max(one.state.n_embd_r, one.state.n_embd_s) for one in self._memory.plan.layers)
            self._zeros = GraphInput(self._arena.tensor(DType.F32, (widest,), "zeros"))
        row = self._zeros.tensor
        return row if width == row.ne[0] else ops.view(self._arena, row, (width, 1, 1, 1), (4 * width,) * 3, 0)
