"""RowIndex: a tensor that names rows of others, as the checks before a computation see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pykv._native import ffi, lib
from pykv.errors import TensorError
from pykv.typing import AnyArray

if TYPE_CHECKING:
    from pykv.ggml.tensor import Tensor

_FEW = 16


class RowIndex:
    """Where an index lies and what it may name.

    It does not hold the tensor: an arena that held its own tensors, which hold it, would outlive its last user.

    Attributes
    ----------
    below : how many rows there are, of the smallest tensor that the index is used on.
    """

    __slots__ = ("_kind", "_nbytes", "_raw", "below")

    def __init__(self, tensor: Tensor, n_rows: int) -> None:
        self._raw, self._nbytes, self._kind = tensor.raw, tensor.nbytes, tensor.dtype.numpy_dtype
        self.below = n_rows

    @property
    def has_data(self) -> bool:
        """Whether it has been given memory; a scheduler gives none to an index that no node of the graph reads."""
        return bool(self._raw.data != ffi.NULL)

    def zero(self) -> None:
        """Let every entry name row 0."""
        lib.ggml_backend_tensor_set(self._raw, ffi.from_buffer(np.zeros(self._nbytes, np.uint8)), 0, self._nbytes)

    def host_view(self) -> AnyArray | None:
        """Return the entries (n,) where they lie, if that is memory which the caller can write without pykv."""
        if not lib.ggml_backend_buffer_is_host(self._raw.buffer):
            return None
        return np.frombuffer(ffi.buffer(self._raw.data, self._nbytes), self._kind)

    def check(self, rows: AnyArray) -> None:
        """Raise unless the values (n,) of an array, of the index's type, name rows that there are.

        Raises
        ------
        TensorError : one does not; ggml would end the process in the middle of the computation.
        """
        if rows.size == 0:
            return
        if rows.size <= _FEW:  # one token: a reduction of numpy costs microseconds
            values = rows.tolist()
            ok = min(values) >= 0 and max(values) < self.below
        else:
            ok = bool(rows.view(np.uint32 if rows.itemsize == 4 else np.uint64).max() < self.below)
        if not ok:
            name = ffi.string(lib.ggml_get_name(self._raw)).decode(errors="replace")
            worst = next(row for row in rows.tolist() if not 0 <= row < self.below)
            raise TensorError(f"{name!r}: {worst} names no row; they are 0 to {self.below - 1}")
