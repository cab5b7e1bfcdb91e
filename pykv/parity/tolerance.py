"""How far apart sound devices lie, as NMSE: squared error over squared size.

Two kernels add the same numbers in another order, and round what goes in between to what their device computes in:

f32 weights       up to 4e-5 where a device computes products in f16, as many GPUs do; 1e-11 where it does not
f16, bf16         up to 1e-4: operands are f16 on both sides, sums are not
quantised         up to 4e-3: the CPU rounds activations to 8 bits for its products with such weights, GPUs do not

All measured; the limits are two or three times that. Stored types add what replay's tolerances say of them. What
another split of the same batch makes on the reference itself is measured in each comparison, and `FACTOR` times that
counts as rounding too: a model may amplify more than those that these figures come from.
"""

from __future__ import annotations

from collections.abc import Iterable

from pykv.ggml import DType
from pykv.runtime.replay.tolerance import STORED

FACTOR = 10.0
"""What another split makes, times this, is still rounding."""

EXACT = 1e-10
"""NMSE up to which rows are called the same: f32 sums in another order."""

_WEIGHTS = {DType.F32: 1e-4, DType.F16: 1e-3, DType.BF16: 1e-3}
_QUANTISED = 1e-2


def limit(weights: Iterable[DType], type_k: DType, type_v: DType) -> float:
    """Return the NMSE up to which rounding explains a difference, from the types of matrices and of stored K and V."""
    products = max((_WEIGHTS.get(dtype, _QUANTISED) for dtype in weights), default=_QUANTISED)
    stored = max(STORED[type_k], STORED[type_v])
    return max(products, stored)
