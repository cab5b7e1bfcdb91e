"""What every operation checks before its one C call: ggml ends the process where these raise."""

from __future__ import annotations

from pykv.errors import TensorError
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def require(ok: bool, op: str, problem: str, *tensors: Tensor) -> None:
    """Raise `TensorError` naming the operation and its operands unless `ok`."""
    if not ok:
        raise TensorError(f"{op}: {problem}: {', '.join(map(repr, tensors))}")


def require_dtype(op: str, tensor: Tensor, *dtypes: DType) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dtype.label for dtype in dtypes)
        raise TensorError(f"{op}: wants {wanted}: {tensor!r}")


def can_repeat(small: Tensor, large: Tensor) -> bool:
    """Whether `small` tiles `large` in every dim."""
    return all(n_large % n_small == 0 for n_small, n_large in zip(small.ne, large.ne, strict=True))
