"""RowEngine: where graphs over the rows of a store run. Threads and compute memory are had when first needed."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.ggml import Arena, Backend, Sched, cpu_device, devices
from pykv.memory.kv_store import KVStore
from pykv.memory.row_graph import NODES_BESIDE, NODES_PER_LAYER, RowGraph
from pykv.typing import I32Array, I64Array


class RowEngine:
    """Holds one graph at a time.

    Parameters
    ----------
    n_threads : CPU threads.
    """

    def __init__(self, store: KVStore, n_threads: int) -> None:
        self._store, self._n_threads = store, n_threads
        self._parts: _Parts | None = None
        self._allocated: RowGraph | None = None

    def fresh(self, n_rows: int, n_pos: int) -> RowGraph:
        """Return an empty graph over so many rows and positions; the one before is gone."""
        if self._parts is None:
            self._parts = self._make()
        self._allocated = None
        self._parts.sched.reset()
        self._parts.arena.reset()
        return RowGraph(self._parts.arena, n_rows, n_pos)

    def run(self, row_graph: RowGraph, rows: I64Array, pos: I32Array) -> None:
        """Compute the graph over these rows and positions.

        Raises
        ------
        UnsupportedOpError, AllocError, ComputeError : a device cannot.
        """
        assert self._parts is not None, "it has made the graph"
        if row_graph is not self._allocated:
            self._parts.sched.allocate(row_graph.graph)
            row_graph.bind()
            self._allocated = row_graph
        row_graph.fill(rows, pos)
        self._parts.sched.compute(row_graph.graph)

    def close(self) -> None:
        """Free the compute memory and the threads."""
        parts, self._parts, self._allocated = self._parts, None, None
        if parts is not None:
            parts.sched.close()
            parts.arena.close()
            for backend in parts.backends:
                backend.close()

    def _make(self) -> _Parts:
        plan = self._store.plan
        homes = {kind for kind, _ in plan.by_buffer_type}
        far = [device for device in devices() if device.kind != "cpu" and device.buffer_type in homes]
        # without a cancel flag: a turn that stopped half way would leave keys that fit no position
        backends = [Backend(device, self._n_threads) for device in (*far, cpu_device())]
        budget = NODES_BESIDE + NODES_PER_LAYER * max(1, len(plan.layers))
        arena = Arena(budget, budget)
        return _Parts(backends, arena, Sched(backends, budget, (*self._store.owners, arena)))


@dataclass(frozen=True)
class _Parts:
    backends: list[Backend]
    arena: Arena
    sched: Sched
