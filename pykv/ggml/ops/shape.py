"""Views, permutations and copies."""

from __future__ import annotations

from math import prod

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import require
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType


def reshape(arena: Arena, a: Tensor, *ne: int) -> Tensor:
    """Return a contiguous tensor under other dims, one to four of them."""
    ok = 1 <= len(ne) <= 4 and prod(ne) == a.n_elements and a.is_contiguous
    require(ok, "reshape", f"cannot become {list(ne)}", a)
    function = (lib.ggml_reshape_1d, lib.ggml_reshape_2d, lib.ggml_reshape_3d, lib.ggml_reshape_4d)[len(ne) - 1]
    return Tensor(function(arena.take(), a.ptr, *ne), arena)


def view(
    arena: Arena, a: Tensor, ne: tuple[int, int, int, int], nb: tuple[int, int, int], offset: int = 0
) -> Tensor:
    """Return a view `[ne0, ne1, ne2, ne3]` with byte strides `nb` of dims 1 to 3, from a byte offset."""
    rows = sum((n - 1) * stride for n, stride in zip(ne[1:], nb, strict=True))
    end = offset + rows + a.dtype.row_size(ne[0])
    require(min(ne) > 0 and offset >= 0 and end <= a.nbytes, "view", f"{list(ne)} at {offset} leaves it", a)
    return Tensor(lib.ggml_view_4d(arena.take(), a.ptr, *ne, *nb, offset), arena)


def permute(arena: Arena, a: Tensor, *axes: int) -> Tensor:
    """Return a view whose dim ``axes[i]`` is dim ``i`` of `a`."""
    require(sorted(axes) == [0, 1, 2, 3], "permute", f"axes {list(axes)} are no permutation of 0..3", a)
    return Tensor(lib.ggml_permute(arena.take(), a.ptr, *axes), arena)


def transpose(arena: Arena, a: Tensor) -> Tensor:
    """Return a view with dims 0 and 1 exchanged."""
    return Tensor(lib.ggml_transpose(arena.take(), a.ptr), arena)


def cont(arena: Arena, a: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return Tensor(lib.ggml_cont(arena.take(), a.ptr), arena)


def cast(arena: Arena, a: Tensor, dtype: DType) -> Tensor:
    """Return a contiguous copy in another type."""
    require(a.ne[0] % dtype.block_size == 0, "cast", f"rows are no whole blocks of {dtype.label}", a)
    return Tensor(lib.ggml_cast(arena.take(), a.ptr, dtype), arena)


def pad(arena: Arena, a: Tensor, n: int) -> Tensor:
    """Return `a` with `n` zeros behind each row."""
    require(n >= 0 and a.dtype == DType.F32, "pad", f"cannot add {n} zeros", a)
    return Tensor(lib.ggml_pad(arena.take(), a.ptr, n, 0, 0, 0), arena)
