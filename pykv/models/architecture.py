"""Architecture: what a model family offers to a context."""

from __future__ import annotations

from typing import ClassVar, Protocol

from pykv.ggml import Tensor
from pykv.memory import MemorySpec
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.rope import ContextRope


class Architecture(Protocol):
    """The weights of one model, what its memory must know, and its graph.

    Attributes
    ----------
    nodes_per_layer : nodes of one layer's graph, at most, with what its memory and an observer add.
    nodes_per_snapshot : what a layer with a state takes, at most, to keep one more beside the latest.
    hparams : sizes.
    """

    nodes_per_layer: ClassVar[int] = 96
    nodes_per_snapshot: ClassVar[int] = 2
    hparams: HParams

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        ...

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        ...
