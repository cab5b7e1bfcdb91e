"""Architecture: what a model family offers to a context."""

from __future__ import annotations

from typing import Protocol

from pykv.ggml import Tensor
from pykv.memory import MemorySpec
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.rope import ContextRope

NODES_PER_LAYER = 96
"""Nodes of one layer's graph, at most, with what its memory and an observer add, in a family that says nothing else."""

NODES_PER_SNAPSHOT = 2
"""What a layer with a state takes to keep one more beside the latest, in a family that says nothing else."""


class Architecture(Protocol):
    """The weights of one model, what its memory must know, and its graph.

    A family whose layers have more than `NODES_PER_LAYER` nodes says so in ``nodes_per_layer``, one that takes more
    than `NODES_PER_SNAPSHOT` for a state in ``nodes_per_snapshot``.
    """

    @property
    def hparams(self) -> HParams:
        """Sizes."""
        ...

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        ...

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        ...


def nodes_per_layer(model: Architecture) -> int:
    """Return the nodes that one layer of a model has at most."""
    return int(getattr(model, "nodes_per_layer", NODES_PER_LAYER))


def nodes_per_snapshot(model: Architecture) -> int:
    """Return the nodes that a layer takes at most for each state beside the latest."""
    return int(getattr(model, "nodes_per_snapshot", NODES_PER_SNAPSHOT))
