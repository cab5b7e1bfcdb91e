"""Views, permutations, copies and joins."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from pykv._native import lib
from pykv.ggml.arena import Arena
from pykv.ggml.ops.check import FLOATS, READABLE, STORABLE, require, require_dtype, require_writable
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType

_INT_MAX = 2**31 - 1


def reshape(arena: Arena, a: Tensor, *ne: int) -> Tensor:
    """Return a contiguous tensor under other dims, one to four of them."""
    ok = 1 <= len(ne) <= 4 and min(ne) >= 1 and prod(ne) == a.n_elements and ne[0] % a.dtype.block_size == 0
    require(ok and a.is_contiguous, "reshape", f"cannot become {list(ne)}", a)
    function = (lib.ggml_reshape_1d, lib.ggml_reshape_2d, lib.ggml_reshape_3d, lib.ggml_reshape_4d)[len(ne) - 1]
    return arena.node(function, (a,), *ne, view_of=a)


def view(arena: Arena, a: Tensor, ne: tuple[int, int, int, int], nb: tuple[int, int, int], offset: int = 0) -> Tensor:
    """Return a view `[ne0, ne1, ne2, ne3]` with byte strides `nb` of dims 1 to 3, from a byte offset.

    Raises
    ------
    TensorError : it leaves `a`, overlaps itself so much that its elements would not fit there, or begins inside an
        element.
    """
    ok = min(ne) > 0 and min(*nb, offset) >= 0 and all(n % a.dtype.type_size == 0 for n in (*nb, offset))
    require(ok, "view", f"{list(ne)} with strides {list(nb)} at {offset} is malformed", a)
    row = a.dtype.row_size(ne[0])
    last = sum((n - 1) * stride for n, stride in zip(ne[1:], nb, strict=True))
    # note: ggml wants room for as many elements as the view has, also where they overlap
    ok = offset + max(last + row, row * prod(ne[1:])) <= a.nbytes and a.has_dense_rows
    require(ok, "view", f"{list(ne)} with strides {list(nb)} at {offset} leaves it", a)
    return arena.node(lib.ggml_view_4d, (a,), *ne, *nb, offset, view_of=a)


def permute(arena: Arena, a: Tensor, *axes: int) -> Tensor:
    """Return a view whose dim ``axes[i]`` is dim ``i`` of `a`."""
    require(sorted(axes) == [0, 1, 2, 3], "permute", f"axes {list(axes)} are no permutation of 0..3", a)
    require(axes[0] == 0 or not a.dtype.is_quantized, "permute", "blocks cannot be taken apart", a)
    require(max(a.ne) <= _INT_MAX, "permute", "a dim is too large", a)
    out = arena.node(lib.ggml_permute, (a,), *axes, view_of=a)
    # note: ggml carries strides through an int here, and a stream of a large cache is more than 2 GiB
    return out if max(a.nb) <= _INT_MAX else _with_strides(out, a, axes)


def _with_strides(out: Tensor, a: Tensor, axes: tuple[int, ...]) -> Tensor:
    for axis, stride in zip(axes, a.nb, strict=True):
        out.raw.nb[axis] = stride
    out.nb = tuple(out.raw.nb)
    return out


def transpose(arena: Arena, a: Tensor) -> Tensor:
    """Return a view with dims 0 and 1 exchanged."""
    require(not a.dtype.is_quantized, "transpose", "blocks cannot be taken apart", a)
    return arena.node(lib.ggml_transpose, (a,), view_of=a)


def cont(arena: Arena, a: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return arena.node(lib.ggml_cont, (a,))


def cast(arena: Arena, a: Tensor, dtype: DType) -> Tensor:
    """Return a contiguous copy in another type: a float as any that a cache may hold, a quantised one as f32."""
    if a.dtype == dtype:
        return cont(arena, a)
    require_dtype("cast", a, *READABLE)
    require(a.ne[0] % dtype.block_size == 0, "cast", f"rows are no whole blocks of {dtype.label}", a)
    if a.dtype in FLOATS:
        ok = dtype in FLOATS or (dtype in STORABLE and a.has_dense_rows)
    else:
        ok = dtype == DType.F32 and a.n_elements <= 2**32  # ggml counts them in 32 bits
    require(ok, "cast", f"cannot become {dtype.label}", a)
    return arena.node(lib.ggml_cast, (a,), dtype)


def cpy(arena: Arena, a: Tensor, target: Tensor) -> Tensor:
    """Write the elements of `a`, in ne order, into those of `target`; mutates `target`. Returns a view of it.

    Both are floats and may have any strides and different shapes of as many elements; or `target` is of a quantised
    type that a cache may hold, contiguous, and `a` a float of its shape with dense rows. They must not overlap.
    """
    require_dtype("cpy", a, *FLOATS)
    require_dtype("cpy", target, *STORABLE)
    ok = target.dtype in FLOATS or (a.ne == target.ne and a.has_dense_rows and target.is_contiguous)
    require(ok and a.n_elements == target.n_elements, "cpy", "shapes or layouts do not fit", a, target)
    require_writable("cpy", target)
    return arena.node(lib.ggml_cpy, (a, target), view_of=target)


def concat(arena: Arena, a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Return `b` behind `a` along a dim, floats of one type with any strides; all other dims are equal."""
    require_dtype("concat", a, *FLOATS)
    ok = dim in (0, 1, 2, 3) and a.dtype == b.dtype and all(a.ne[i] == b.ne[i] for i in range(4) if i != dim)
    require(ok, "concat", f"types differ, or dims other than dim={dim}", a, b)
    a.dtype.check_size([n + b.ne[i] * (i == dim) for i, n in enumerate(a.ne)])
    return arena.node(lib.ggml_concat, (a, b), dim)


def join(arena: Arena, parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return one tensor or more, one behind the other along a dim, as `concat` takes them.

    By halves, so that none is copied once for every other.
    """
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return concat(arena, join(arena, parts[:half], dim), join(arena, parts[half:], dim), dim)


def repeat(arena: Arena, a: Tensor, *ne: int) -> Tensor:
    """Return `a`, a float with dense rows, repeated to other dims, one to four of them: multiples of its own."""
    require_dtype("repeat", a, *FLOATS)
    whole = (*ne, 1, 1, 1)[:4]
    ok = 1 <= len(ne) <= 4 and min(ne) >= 1 and all(n % own == 0 for n, own in zip(whole, a.ne, strict=True))
    require(ok and a.has_dense_rows, "repeat", f"cannot become {list(ne)}", a)
    a.dtype.check_size(whole)
    return arena.node(lib.ggml_repeat_4d, (a,), *whole)


def pad(arena: Arena, a: Tensor, n: int) -> Tensor:
    """Return `a` with `n` zeros behind each row."""
    require_dtype("pad", a, DType.F32)
    require(0 <= n <= _INT_MAX and a.has_dense_rows, "pad", f"cannot add {n} zeros to each row", a)
    DType.F32.check_size((a.ne[0] + n, *a.ne[1:]))
    return arena.node(lib.ggml_pad, (a,), n, 0, 0, 0)
