"""Architecture: what a model family offers to a context."""

from __future__ import annotations

from typing import Protocol

from pykv.ggml import Tensor
from pykv.memory import MemorySpec
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.rope import ContextRope


class Architecture(Protocol):
    """The weights of one model, what its memory must know, and its graph."""

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
