"""Temperature: queries that grow with their position, so that attention stays sharp over long texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykv.batch import UBatch
from pykv.ggml import DType, Tensor, ops
from pykv.models.graph_builder import GraphBuilder
from pykv.typing import AnyArray


@dataclass(frozen=True)
class Temperature:
    """A query at position p is multiplied by 1 + scale · ln(1 + floor((p + offset) / length)).

    Follows llama.cpp's ``llm_graph_input_attn_temp``.
    """

    scale: float
    length: int
    offset: int = 0

    def apply(self, b: GraphBuilder, q: Tensor) -> Tensor:
        """Return the queries [head, n_head, n_tokens], multiplied."""
        return ops.mul(b.arena, q, b.input(DType.F32, (1, 1, b.shape.n_tokens), "temperature", self._write))

    def _write(self, array: AnyArray, ubatch: UBatch) -> None:
        array[0, :, 0, 0] = 1 + self.scale * np.log1p((ubatch.pos[0] + self.offset) // self.length)
