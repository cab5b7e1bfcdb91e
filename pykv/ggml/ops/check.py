"""What every operation checks before its one C call: ggml ends the process where these raise."""

from __future__ import annotations

from pykv.errors import TensorError
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

FLOATS = (DType.F32, DType.F16, DType.BF16)

STORABLE = (*FLOATS, DType.Q8_0, DType.Q5_1, DType.Q5_0, DType.Q4_1, DType.Q4_0, DType.IQ4_NL)
"""What a cache may hold: every backend's kernels write these."""

READABLE = tuple(t for t in DType if t in FLOATS or (t.is_quantized and t not in (DType.Q8_1, DType.Q8_K)))
"""What weights may be: the two left out hold intermediate results only."""


def require(ok: bool, op: str, problem: str, *tensors: Tensor) -> None:
    """Raise `TensorError` naming the operation and its operands unless `ok`."""
    if not ok:
        raise TensorError(f"{op}: {problem}: {', '.join(map(repr, tensors))}")


def require_dtype(op: str, tensor: Tensor, *dtypes: DType) -> None:
    """Raise `TensorError` unless the tensor is of one of the types."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dtype.label for dtype in dtypes)
        raise TensorError(f"{op}: wants {wanted}: {tensor!r}")


def can_repeat(small: Tensor, large: Tensor) -> bool:
    """Whether `small` tiles `large` in every dim."""
    return all(n_large % n_small == 0 for n_small, n_large in zip(small.ne, large.ne, strict=True))


def is_evenly_spaced(a: Tensor) -> bool:
    """Whether rows are dense and lie at equal distances over all dims, gaps allowed."""
    stride = a.nb[1] * a.ne[1]
    return a.has_dense_rows and (a.ne[2] == 1 or a.nb[2] == stride) and (a.ne[3] == 1 or a.nb[3] == stride * a.ne[2])


def require_writable(op: str, a: Tensor) -> None:
    """Raise `TensorError` if the memory that the operation changes must not be written."""
    require(not a.is_read_only, op, "the memory is read-only", a)


def require_matrix(op: str, a: Tensor, b: Tensor) -> None:
    """Raise `TensorError` if `a` is repacked and ggml cannot multiply `b` with it."""
    # note: ggml reads four rows at a time as if nothing lay between them, and does not look
    rows_follow = b.ne[1] == 1 or b.nb[1] == b.dtype.row_size(b.ne[0])
    ok = not a.arena.is_repacked or (b.dtype == DType.F32 and rows_follow and a.ne[3] == b.ne[3] == 1)
    require(ok, op, "a repacked matrix takes f32 columns that lie one after the other, up to three dims", a, b)


def require_index(op: str, index: Tensor, n_rows: int) -> None:
    """Raise `TensorError` if an index is computed by what does not vouch for values below `n_rows`.

    One that the caller fills is looked at before each computation: `Arena.note_index`.
    """
    home = index.base or index
    require(not home.is_node or home.values_below is not None, op, "indices that are computed cannot be checked", index)
    below = home.values_below
    require(below is None or below <= n_rows, op, f"the index is over {below} rows, and there are {n_rows}", index)
