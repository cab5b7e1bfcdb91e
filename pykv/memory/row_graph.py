"""RowGraph: a graph over some stored rows of a KV cache: gather them, turn them, scatter them back.

Rows are counted through all streams: ``stream * n_cells + cell``.
"""

from __future__ import annotations

from pykv.ggml import Arena, DType, Graph, GraphInput, RopeParams, Tensor, ops
from pykv.memory.hadamard import hadamard, rotate
from pykv.memory.spec import LayerSpec
from pykv.typing import I32Array, I64Array

NODES_PER_LAYER = 20
NODES_BESIDE = 8


class RowGraph:
    """Nodes and inputs over `n_rows` rows, which are named when the graph is filled.

    Parameters
    ----------
    n_pos : positions that `fill` will be given: one for each row, or one for all.
    """

    def __init__(self, arena: Arena, n_rows: int, n_pos: int) -> None:
        self.graph, self.shape = Graph(arena), (n_rows, n_pos)
        self._arena = arena
        self._rows = GraphInput(arena.tensor(DType.I32, (n_rows,), "rows"))
        self._pos = GraphInput(arena.tensor(DType.I32, (n_pos,), "positions"))
        self._matrices: dict[int, GraphInput] = {}

    def gather(self, stored: Tensor, rot: int) -> Tensor:
        """Return the rows of `stored` [E, n_cells, n_stream] as f32 [E, n_rows], Hadamard's rotation undone."""
        rows = ops.get_rows(self._arena, self._flat(stored), self._rows.tensor)
        return self._rotated(rows, rot)

    def scatter(self, stored: Tensor, rot: int, rows: Tensor) -> None:
        """Add the node that writes [E, n_rows] back, rotated as they are stored."""
        self.graph.expand(ops.set_rows(self._arena, self._flat(stored), self._rotated(rows, rot), self._rows.tensor))

    def rope(self, rows: Tensor, layer: LayerSpec, params: RopeParams) -> Tensor:
        """Return keys [E, n_rows] rotated by the positions, as [E, n_rows] again."""
        n_rows, n_pos = self.shape
        # with one position for all, every head of every row counts as a head of one token: its sines are computed once
        n_heads = layer.n_head_kv * (n_rows // n_pos)
        heads = ops.reshape(self._arena, rows, layer.n_embd_head_k, n_heads, n_pos)
        if not layer.rope_at:
            turned = ops.rope(self._arena, heads, self._pos.tensor, params, layer.rope_factors)
            return ops.reshape(self._arena, turned, *rows.ne[:2])
        at, size = layer.rope_at, heads.dtype.type_size
        strides = (size * layer.n_embd_head_k, size * rows.ne[0] * (n_rows // n_pos), size * rows.n_elements)
        front = ops.view(self._arena, heads, (at, n_heads, n_pos, 1), strides, 0)
        back = ops.view(self._arena, heads, (layer.n_embd_head_k - at, n_heads, n_pos, 1), strides, size * at)
        turned = ops.rope(self._arena, back, self._pos.tensor, params, layer.rope_factors)
        return ops.reshape(self._arena, ops.concat(self._arena, front, turned, 0), *rows.ne[:2])

    def bind(self) -> None:
        """Find the memory of the inputs, once the graph has been allocated."""
        for one in self._inputs:
            one.bind()

    def fill(self, rows: I64Array, pos: I32Array) -> None:
        """Write the inputs: which rows, and by how many positions."""
        self._rows.array[0, 0, 0] = rows
        self._pos.array[0, 0, 0] = pos
        for n, matrix in self._matrices.items():
            matrix.array[0, 0] = hadamard(n)
        for one in self._inputs:
            one.commit()

    @property
    def _inputs(self) -> tuple[GraphInput, ...]:
        return (self._rows, self._pos, *self._matrices.values())

    def _flat(self, stored: Tensor) -> Tensor:
        return ops.reshape(self._arena, stored, stored.ne[0], stored.ne[1] * stored.ne[2])

    def _rotated(self, rows: Tensor, rot: int) -> Tensor:
        """Return rows under Hadamard's rotation, which undoes itself; `rot` is its block, 0 for none."""
        if not rot:
            return rows
        if rot not in self._matrices:
            self._matrices[rot] = GraphInput(self._arena.tensor(DType.F32, (rot, rot), "hadamard"))
        return rotate(self._arena, rows, self._matrices[rot].tensor)
