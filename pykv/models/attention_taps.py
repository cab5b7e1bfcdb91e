"""AttentionTaps: keeps what each layer's attention gives, where a graph is built to show it."""

from __future__ import annotations

from pykv.ggml import Graph, GraphOutput, Tensor, ops
from pykv.memory.memory_graph import AttentionGraph


class AttentionTaps:
    """Stands between a model's graph and the attention of its memory.

    Attributes
    ----------
    outputs : layer → attention outputs [Dv * H, n_tokens], in the order of the ubatch.
    """

    def __init__(self, graph: Graph, attention: AttentionGraph) -> None:
        self._graph, self._attention = graph, attention
        self.outputs: dict[int, GraphOutput] = {}

    def store(self, il: int, k: Tensor, v: Tensor | None = None) -> None:
        """See `AttentionGraph`."""
        self._attention.store(il, k, v)

    def attend(self, il: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionGraph`."""
        out = self._attention.attend(il, q, scale, sinks)
        arena = self._graph.arena
        whole = out if out.is_contiguous else ops.cont(arena, out)
        shown = ops.reshape(arena, whole, whole.ne[0] * whole.ne[1], whole.ne[2] * whole.ne[3])
        # a copy: what comes behind may write its results over its operands
        self.outputs[il] = GraphOutput(ops.cont(arena, shown))
        self._graph.expand(self.outputs[il].tensor)
        return out

    def observes(self, il: int) -> bool:
        """See `AttentionGraph`."""
        return self._attention.observes(il)
