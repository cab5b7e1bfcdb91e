"""How far rows of two sound runs may lie apart, as NMSE: squared error over squared size.

In the first layer, K and V are what was stored, changed by its element type alone. Behind it, attention has spread
the error of every row it read. A key that is turned wrongly costs 0.05 and more, another token's about 2; one key of n
that is seen or hidden wrongly costs about 1/n in the stand-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykv.ggml import DType

STORED = {
    DType.F32: 1e-5,
    DType.F16: 1e-4,
    DType.BF16: 1e-3,
    DType.Q8_0: 5e-3,
    DType.Q5_1: 2e-2,
    DType.Q5_0: 2e-2,
    DType.Q4_1: 1e-1,
    DType.Q4_0: 1e-1,
    DType.IQ4_NL: 1e-1,
}
"""Of stored rows: rounding, with room for a hundred moves that each round again."""

SPREAD = {
    DType.F32: 1e-5,
    DType.F16: 2e-5,
    DType.BF16: 1e-3,
    DType.Q8_0: 1e-2,
    DType.Q5_1: 1e-1,
    DType.Q5_0: 1e-1,
    DType.Q4_1: 5e-1,
    DType.Q4_0: 5e-1,
    DType.IQ4_NL: 5e-1,
}
"""Behind the first layer of a stand-in: about ten times what 3 and 30 layers made of it, measured against f16."""

MODEL_STORED, MODEL_SPREAD, MODEL_FACTOR, MOST = 1e-3, 2e-2, 10.0, 1.0
"""Weights that are quantised round activations too, and models amplify: SmolLM2 Q4_1 turned 1e-7 into 3e-3."""


RECORDED, MODEL_RECORDED = 1e-5, 2e-3
"""Of fingerprints, where the types are those of the recording and only the kernels are another machine's. Those of two
builds of ggml were 5e-14 apart in a stand-in and up to 1e-3 in SmolLM2; one token of 15 that should not have been seen
made 4e-3 and more in a stand-in within ten tokens, and 1e-3 to 3e-2 in SmolLM2."""


@dataclass(frozen=True)
class Tolerance:
    """NMSE up to which rows count as equal.

    Attributes
    ----------
    stored : K and V of the first layer.
    spread : all behind it, and logits.
    """

    stored: float
    spread: float

    @classmethod
    def of(cls, *types: DType, is_model: bool) -> Self:
        """Return what rounding to these types explains, in a model or in a stand-in."""
        stored, spread = max(STORED[dtype] for dtype in types), max(SPREAD[dtype] for dtype in types)
        if not is_model:
            return cls(stored, spread)
        return cls(max(stored, MODEL_STORED), min(MOST, max(MODEL_SPREAD, MODEL_FACTOR * spread)))

    @classmethod
    def of_recording(cls, *, is_model: bool) -> Self:
        """Return what another machine explains, all else being as recorded."""
        limit = MODEL_RECORDED if is_model else RECORDED
        return cls(limit, limit)
