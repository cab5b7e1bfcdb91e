"""A twin memory in use: beside each token's K and V, its index stores what can be told from those.

Where the index has no rotary positions it stores V as its keys, else the negated keys, which turn as those do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.memory_scene import MemoryScene
from support.rows_held import rows_held

from pykv.batch import UBatch
from pykv.cells import SwaType, Window
from pykv.ggml import Arena, GraphInput, RopeParams, Tensor, ops
from pykv.memory import KVSettings, LayerSpec, MemorySpec
from pykv.memory.twin import TwinCache, TwinGraph

HEAD = 8
ROPE = RopeParams(HEAD)
TURNED = 1e-4
"""How far keys may be off that were turned more than once."""


def make_twin(
    n_cells: int = 24, *, turned: bool = True, n_swa: int = 0, place: Any = None, **settings: Any
) -> TwinCache:
    """Return a twin in f32 of two layers, whose V is transposed so that attention rounds nothing.

    Without rotary positions the index stores keys only.
    """
    window = Window(n_swa, SwaType.STANDARD) if n_swa else Window()
    spec = MemorySpec.uniform(2, LayerSpec(1, HEAD, HEAD, ROPE), window=window)
    own = LayerSpec(1, HEAD, 1, ROPE) if turned else LayerSpec(1, HEAD, HEAD, k_only=True)
    index = MemorySpec.uniform(2, own, window=window)
    kinds = {"type_k": "f32", "type_v": "f32", "v_trans": True} | settings
    return TwinCache(spec, index, KVSettings(n_cells, **kinds), index_type="f32", place=place, n_threads=1)


class TwinScene(MemoryScene):
    """Decodes into both caches of a twin and looks back through the main one."""

    def __init__(self, twin: TwinCache) -> None:
        super().__init__(_WithIndex(twin))
        self.twin = twin

    def check_rows(self) -> None:
        """Compare what both caches store of each sequence, cell by cell."""
        twin = self.twin
        twin.check()
        for s in range(twin.n_seq_max):
            main, index = rows_held(twin.main, s), rows_held(twin.index, s)
            assert main.keys() == index.keys()
            for p, row in main.items():
                k, v = np.split(np.frombuffer(row, np.float32).reshape(2, 2 * HEAD), 2, axis=1)
                own = np.frombuffer(index[p], np.float32).reshape(2, -1)[:, :HEAD]
                if twin.index.spec.layers[0].rope is None:
                    assert np.array_equal(own, v)
                else:
                    assert np.abs(own + k).max() <= TURNED


class _WithIndex:
    """A twin whose graph stores in the index whatever is stored in the main cache."""

    def __init__(self, twin: TwinCache) -> None:
        self._twin = twin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._twin, name)

    def graph(self, graph: Any, shape: Any, attention: Any) -> _BothStored:
        return _BothStored(graph.arena, self._twin.graph(graph, shape, attention), self._twin)


@dataclass
class _BothStored:
    arena: Arena
    part: TwinGraph
    twin: TwinCache

    @property
    def kv(self) -> _BothStored:
        return self

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        return self.part.inputs

    def fill(self, slot: Any, ubatch: UBatch) -> None:
        self.part.fill(slot, ubatch)

    def attend(self, il: int, q: Tensor, scale: float) -> Tensor:
        return self.part.kv.attend(il, q, scale)

    def store(self, il: int, k: Tensor, v: Tensor) -> None:
        self.part.kv.store(il, k, v)
        if self.twin.index.spec.layers[il].k_only:
            self.part.index.store(il, v)
        else:
            one = ops.view(self.arena, v, (1, v.ne[1], v.ne[2], 1), (v.nb[1], v.nb[2], v.nb[3]))
            self.part.index.store(il, ops.scale(self.arena, k, -1.0), one)
