"""RowMover: stored rows copied, turned to other positions, and read back, on the devices where they lie.

Rows are counted through all streams: ``stream * n_cells + cell``. Source: spec kv_cache.md section 7, session.md
section 2.5; follows llama.cpp's ``build_graph_shift``.
"""

from __future__ import annotations

import numpy as np

from pykv.cells import RowCopy
from pykv.ggml import Tensor
from pykv.ggml.tensor_rows import copy_rows
from pykv.memory.kv_store import KVStore
from pykv.memory.rope_turn import turn, unturn
from pykv.memory.row_engine import RowEngine
from pykv.memory.row_graph import RowGraph
from pykv.memory.spec import LayerSpec
from pykv.memory.v_layout import copy_cells, read_cells
from pykv.typing import F32Array, I32Array, I64Array

CHUNK_BYTES = 2**20
"""Rows that are turned or read at once, as f32: what stays in a core's cache from one operation to the next."""


class RowMover:
    """What is done to the rows of one store outside a model's graph.

    Attributes
    ----------
    store : whose rows.
    n_rows_at_once : how many rows to turn or read in one computation.

    Parameters
    ----------
    n_threads : CPU threads.
    """

    def __init__(self, store: KVStore, n_threads: int) -> None:
        self.store, self._layers = store, store.plan.spec.layers
        self._engine = RowEngine(store, n_threads)
        self._turning: RowGraph | None = None
        widest = max((layer.n_embd_k for layer in store.plan.layers), default=1)
        self.n_rows_at_once = max(1, CHUNK_BYTES // (4 * widest))

    def copy(self, copy: RowCopy) -> None:
        """Copy the K and V of cells onto others, byte for byte, in every layer of the store's own."""
        n_cells = self.store.plan.settings.n_cells
        src, dst = copy.src_stream * n_cells + copy.src, copy.dst_stream * n_cells + copy.dst
        for _, k, v in self.store.own_tensors():
            copy_rows(k, src, dst)
            if v is not None and self.store.v_trans:
                copy_cells(v, copy)
            elif v is not None:
                copy_rows(v, src, dst)

    def turn(self, rows: I64Array, deltas: I32Array) -> None:
        """Rotate the keys of (k,) rows by (k,) positions, or by one for all, (1,). Mutates K, and of K only these.

        Raises
        ------
        UnsupportedOpError, AllocError, ComputeError : a device cannot.
        """
        if not any(self._layers[layer.il].rope for layer in self.store.plan.layers):
            return
        graph, self._turning = self._turning, None
        if graph is None or graph.shape != (rows.size, deltas.size):
            graph = self._turn_graph(rows.size, deltas.size)
        self._engine.run(graph, rows, deltas)
        self._turning = graph  # one that failed is of no use any more

    def read_k(self, il: int, rows: I64Array, pos: I32Array | None) -> F32Array:
        """Return the keys of (k,) rows, (k, n_head_kv, n_embd_head_k); given their positions, as before RoPE."""
        layer, stored = self._layers[il], self.store.tensors(il)[0]
        keys = self._read(stored, self.store.rot_k, rows, None if pos is None else (layer, -pos))
        return keys.reshape(rows.size, layer.n_head_kv, layer.n_embd_head_k)

    def read_v(self, il: int, rows: I64Array) -> F32Array:
        """Return the values of (k,) rows of one stream, (k, n_head_kv, n_embd_head_v)."""
        layer, stored = self._layers[il], self.store.tensors(il)[1]
        if stored is None:
            return self.read_k(il, rows, None)[:, :, : layer.n_embd_head_v]
        if self.store.v_trans and rows.size:
            values = read_cells(stored, rows)[:, : layer.n_embd_v]
        else:
            values = self._read(stored, self.store.rot_v, rows)
        return values.reshape(rows.size, layer.n_head_kv, layer.n_embd_head_v)

    def close(self) -> None:
        """Free the compute memory and the threads."""
        self._turning = None
        self._engine.close()

    def _read(
        self, stored: Tensor, rot: int, rows: I64Array, moved: tuple[LayerSpec, I32Array] | None = None
    ) -> F32Array:
        """Return (k, E) rows of a tensor [E, n_cells, n_stream]; keys of a layer with RoPE moved by (k,) positions."""
        layer, deltas = moved or (None, np.zeros(rows.size, np.int32))
        out = np.empty((rows.size, stored.ne[0]), np.float32)
        for at in range(0, rows.size, self.n_rows_at_once):
            some = slice(at, at + self.n_rows_at_once)
            row_graph = self._fresh(rows[some].size, rows[some].size)
            values = row_graph.gather(stored, rot)
            if layer is not None and layer.rope is not None:
                values = row_graph.rope(values, layer, unturn(layer.rope))
            row_graph.graph.expand(values.as_output())
            self._engine.run(row_graph, rows[some], deltas[some])
            out[some] = values.numpy()[0, 0]
        return out

    def _turn_graph(self, n_rows: int, n_pos: int) -> RowGraph:
        row_graph, rot = self._fresh(n_rows, n_pos), self.store.rot_k
        for il, k, _ in self.store.own_tensors():
            layer = self._layers[il]
            if layer.rope is not None:
                row_graph.scatter(k, rot, row_graph.rope(row_graph.gather(k, rot), layer, turn(layer.rope)))
        return row_graph

    def _fresh(self, n_rows: int, n_pos: int) -> RowGraph:
        self._turning = None
        return self._engine.fresh(n_rows, n_pos)
