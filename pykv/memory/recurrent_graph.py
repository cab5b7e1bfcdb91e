"""The part of a model's graph that belongs to recurrent states: gather them, zero them, put them back.

Which rows are read and written is input, so that one graph serves every ubatch of equal shape.
Source: spec iswa_recurrent_hybrid.md section 2.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykv.batch import UBatch
from pykv.cells import RecurrentSlot
from pykv.errors import ParamError
from pykv.ggml import DType, Graph, GraphInput, Tensor, ops
from pykv.memory.memory_graph import MemoryGraph, Scan
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
        self._planes = np.arange(self.n_planes)[:, None]
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

    def fill(self, slot: RecurrentSlot, ubatch: UBatch, chosen: Sequence[BoolArray] | None = None) -> None:
        """See `MemoryGraph.fill`."""
        n, n_cells, first = slot.n_seqs, self._memory.n_cells, slot.head
        for name, index in self._indices.items():
            rows = index.array[0, 0, 0]
            if name == "read":
                rows[:] = slot.s_copy[:n]
            elif name == "read_extra":
                rows[:] = slot.s_copy[n:]
            elif name == "write_extra":
                rows[:] = np.arange(first + n, first + slot.n)
            elif name == "fresh":
                rows[0] = slot.rs_z
            else:
                rows.reshape(self.n_planes, n)[:] = first + n_cells * self._planes + np.arange(n)
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

    def scan_s(self, il: int, scan: Scan) -> tuple[Tensor, Tensor]:
        """Return what `scan` makes of the states, which it reads where they are stored."""
        stored = self._stored(il, 1)
        self._clear_fresh(stored)
        out = scan(stored, self._index("read", self.shape.n_seqs, DType.I32))
        self._graph.expand(out[0])
        self._move_extra(stored)
        return out

    def write_r(self, il: int, planes: Sequence[Tensor]) -> None:
        """Add nodes that store the rows after the ubatch, and before its last, its last two tokens and so on.

        One tensor for each plane, n_embd_r elements of a sequence behind those of another, in up to three dims.
        """
        self._write(self._stored(il, 0), ops.join(self._arena, planes, 3))

    def write_s(self, il: int, states: Tensor) -> None:
        """Add nodes that store the states [n_embd_s, n_seqs, n_planes], plane by plane as in `write_r`."""
        self._write(self._stored(il, 1), states)

    # mechanism

    def _stored(self, il: int, which: int) -> Tensor:
        tensor = self._memory.tensors(il)[which]
        if tensor is None:
            raise ParamError(f"il={il}: this layer has no {'rs'[which]} state")
        return tensor

    def _read(self, stored: Tensor) -> Tensor:
        """Return the rows that the ubatch continues; rows that move out of the way do so once these are read."""
        self._clear_fresh(stored)
        rows = ops.get_rows(self._arena, stored, self._index("read", self.shape.n_seqs, DType.I32))
        self._graph.expand(rows)
        self._move_extra(stored)
        return rows

    def _clear_fresh(self, stored: Tensor) -> None:
        if self.shape.has_fresh:
            # written, not multiplied by 0: what a row held before may be no number
            zeros = self._zero_row(stored.ne[0])
            self._graph.expand(ops.set_rows(self._arena, stored, zeros, self._index("fresh", 1, DType.I64)))

    def _move_extra(self, stored: Tensor) -> None:
        n = self.shape.n_extra
        if n:
            extra = ops.get_rows(self._arena, stored, self._index("read_extra", n, DType.I32))
            self._graph.expand(ops.set_rows(self._arena, stored, extra, self._index("write_extra", n, DType.I64)))

    def _write(self, stored: Tensor, rows: Tensor) -> None:
        n = self.shape.n_seqs * self.n_planes
        if rows.n_elements != n * stored.ne[0]:
            raise ParamError(f"rows {list(rows.ne)}: the ubatch leaves {n} rows of {stored.ne[0]} elements")
        if not rows.is_contiguous:
            rows = ops.cont(self._arena, rows)
        rows = ops.reshape(self._arena, rows, stored.ne[0], n)
        self._graph.expand(ops.set_rows(self._arena, stored, rows, self._index("write", n, DType.I64)))

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
