"""ISWAGraph: the part of a model's graph that belongs to a cache without a window and one with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pykv.batch import UBatch
from pykv.ggml import GraphInput, Tensor
from pykv.memory.kv_graph import KVGraph
from pykv.memory.memory_graph import MemoryGraph
from pykv.memory.spec import MemorySpec
from pykv.typing import BoolArray


class ISWAGraph(MemoryGraph):
    """Nodes and inputs of both caches in one graph."""

    def __init__(self, spec: MemorySpec, base: KVGraph, swa: KVGraph) -> None:
        self._halves = base, swa
        self._is_swa = [layer.is_swa for layer in spec.layers]

    @property
    def kv(self) -> ISWAGraph:
        """The graph itself: it finds the half that a layer belongs to."""
        return self

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that `fill` writes, each once."""
        return tuple(one for half in self._halves for one in half.inputs)

    @property
    def masses(self) -> tuple[Mapping[int, Tensor], ...]:
        """See `MemoryGraph.masses`."""
        of_each = zip(*(half.masses for half in self._halves), strict=True)
        return tuple({**base, **swa} for base, swa in of_each)

    def fill(self, slot: Any, ubatch: UBatch, chosen: Sequence[BoolArray] | None = None) -> None:
        """See `MemoryGraph.fill`; `slot` holds one slot for each cache."""
        for half, own in zip(self._halves, slot, strict=True):
            half.fill(own, ubatch, chosen)

    def store(self, il: int, k: Tensor, v: Tensor | None = None) -> None:
        """See `KVGraph.store`."""
        self._half(il).store(il, k, v)

    def attend(self, il: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """See `KVGraph.attend`."""
        return self._half(il).attend(il, q, scale, sinks)

    def observes(self, il: int) -> bool:
        """Whether a layer is observed."""
        return self._half(il).observes(il)

    def _half(self, il: int) -> KVGraph:
        return self._halves[self._is_swa[il]]
