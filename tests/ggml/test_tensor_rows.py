"""Rows of tensors read, written and copied, in host memory and through a device's own calls."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykv._native import lib
from pykv.errors import TensorError, UseAfterCloseError
from pykv.ggml import Arena, Buffer, DType, Tensor, cpu_device, ops, tensor_rows
from pykv.ggml.tensor_rows import copy_rows, move_rows, read_rows, write_rows

TYPES = ["f32", "f16", "bf16", "i32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]


@contextmanager
def tensor(dtype: str, *ne: int) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Lend a tensor of random bytes, and those by row."""
    with Arena(2) as arena:
        kind = DType.parse(dtype, "dtype")
        made = arena.tensor(kind, ne, "rows")
        with Buffer.allocate(arena, cpu_device().buffer_type, "rows") as buffer:
            n_rows = int(np.prod(ne[1:]))
            values = np.random.default_rng(1).integers(0, 256, (n_rows, kind.row_size(ne[0])), np.uint8)
            buffer.adopt(made).set(values)
            yield made, values


def rows_of(tensor: Tensor, like: np.ndarray) -> np.ndarray:
    return tensor.raw_bytes().reshape(like.shape)


def index(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "device":
        far = SimpleNamespace(
            ggml_backend_buffer_is_host=lambda _: False,
            ggml_backend_view_init=lib.ggml_backend_view_init,
            ggml_backend_tensor_copy=lib.ggml_backend_tensor_copy,
        )
        monkeypatch.setattr(tensor_rows, "lib", far)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_every_type(dtype: str) -> None:
    with tensor(dtype, 64, 10, 3) as (rows, values):
        src, dst = index(0, 1, 2, 29, 11, 7), index(20, 21, 22, 5, 28, 8)
        copy_rows(rows, src, dst)
        expected = values.copy()
        for a, b in zip(src, dst, strict=True):
            expected[b] = values[a]
        assert np.array_equal(rows_of(rows, values), expected)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ((0, 1, 2), (3, 4, 5)),
        ((0, 1, 2), (5, 4, 3)),
        ((2, 1, 0), (3, 4, 5)),
        ((4, 5, 6), (0, 1, 2)),
        ((0, 2), (1, 3)),
        ((0, 0, 0), (3, 4, 5)),
        ((9,), (0,)),
        ((0, 1, 1, 2), (4, 6, 5, 7)),
    ],
)
def test_runs_and_single_rows(src: tuple[int, ...], dst: tuple[int, ...]) -> None:
    with tensor("f16", 6, 10) as (rows, values):
        copy_rows(rows, index(*src), index(*dst))
        expected = values.copy()
        expected[list(dst)] = values[list(src)]
        assert np.array_equal(rows_of(rows, values), expected)


@given(order=st.permutations(range(12)), n=st.integers(0, 6))
def test_any_rows(order: list[int], n: int) -> None:
    src, dst = index(*order[:n]), index(*order[n : 2 * n])
    with tensor("q8_0", 32, 4, 3) as (rows, values):
        copy_rows(rows, src, dst)
        expected = values.copy()
        expected[dst] = values[src]
        assert np.array_equal(rows_of(rows, values), expected)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize(
    ("src", "dst"), [((0, 10), (1, 2)), ((0, 1), (2, 10)), ((-1,), (2,)), ((2,), (-1,)), ((0, 1), (2,))]
)
def test_rows_that_are_not_there(src: tuple[int, ...], dst: tuple[int, ...]) -> None:
    with tensor("f32", 4, 10) as (rows, values):
        with pytest.raises(TensorError, match="of its 10 rows cannot be copied"):
            copy_rows(rows, index(*src), index(*dst))
        assert np.array_equal(rows_of(rows, values), values)


def test_a_strided_view() -> None:
    with tensor("f32", 8, 10) as (rows, values):
        narrow = ops.view(rows.arena, rows, (4, 10, 1, 1), (rows.nb[1], rows.nb[2], rows.nb[3]))
        with pytest.raises(TensorError, match="cannot be copied"):
            copy_rows(narrow, index(0), index(1))
        assert np.array_equal(rows_of(rows, values), values)


def test_rows_of_a_view_that_was_made_after_its_tensor_was_given_memory() -> None:
    with tensor("f32", 8, 10) as (rows, values):
        tail = ops.view(rows.arena, rows, (8, 4, 1, 1), rows.nb[1:], 6 * rows.nb[1])
        copy_rows(tail, index(0, 1), index(2, 3))
        values[8:] = values[6:8]
        assert np.array_equal(rows_of(rows, values), values)


def test_memory_that_is_mapped_read_only(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(128)))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with Arena(1) as arena:
        rows = arena.tensor(DType.F32, (4, 8), "mapped")
        with Buffer.wrap(arena, cpu_device(), mapped, rows.nbytes) as buffer:
            buffer.place(rows, 0)
            with pytest.raises(TensorError, match="cannot be copied"):
                copy_rows(rows, index(0), index(1))


def test_a_closed_buffer() -> None:
    with tensor("f32", 8, 10) as (rows, _):
        rows.owner.close()
        with pytest.raises(UseAfterCloseError):
            copy_rows(rows, index(0), index(1))
        copy_rows(rows, index(), index())  # nothing is touched


def test_memory_that_was_never_given() -> None:
    with Arena(1) as arena, pytest.raises(TensorError, match="no data yet"):
        copy_rows(arena.tensor(DType.F32, (4, 4), "bare"), index(0), index(1))


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("some", [(0, 1, 2, 29, 11, 7), (3, 4, 5), (9, 8), ()])
def test_rows_read_and_written(dtype: str, some: tuple[int, ...]) -> None:
    with tensor(dtype, 64, 10, 3) as (rows, values):
        chosen = index(*some)
        found = read_rows(rows, chosen)
        assert np.array_equal(found, values[chosen])
        write_rows(rows, chosen, 255 - found)
        expected = values.copy()
        expected[chosen] = 255 - values[chosen]
        assert np.array_equal(rows_of(rows, values), expected)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("src", "dst"), [((9, 10, 11, 2), (0, 1, 2, 7)), ((5,), (0,)), ((3, 2, 1), (4, 5, 3)), ((), ())]
)
def test_rows_moved_to_another_tensor(dtype: str, src: tuple[int, ...], dst: tuple[int, ...]) -> None:
    with tensor(dtype, 64, 10, 3) as (one, values), tensor(dtype, 64, 8) as (other, old):
        move_rows(one, index(*src), other, index(*dst))
        expected = old.copy()
        expected[list(dst)] = values[list(src)]
        assert np.array_equal(rows_of(other, old), expected)
        assert np.array_equal(rows_of(one, values), values)


@pytest.mark.usefixtures("where")
def test_rows_that_cannot_be_read_written_or_moved() -> None:
    with tensor("f32", 4, 10) as (rows, values), tensor("f16", 8, 10) as (other, _):
        for some in ((10,), (-1,), (0, 10)):
            with pytest.raises(TensorError, match="no such"):
                read_rows(rows, index(*some))
            with pytest.raises(TensorError, match="no such"):
                write_rows(rows, index(*some), np.zeros((len(some), 16), np.uint8))
            with pytest.raises(TensorError, match="no such"):
                move_rows(rows, index(*some), rows, index(*range(len(some))))
        for data in (np.zeros((1, 16), np.uint8), np.zeros((2, 15), np.uint8), np.zeros((2, 4), np.float32)):
            with pytest.raises(TensorError, match="2 rows of 16 bytes cannot be written"):
                write_rows(rows, index(0, 1), data)
        for target, dst in ((other, (0, 1)), (rows, (2,))):
            with pytest.raises(TensorError, match=r"2 rows of .* cannot be copied onto"):
                move_rows(rows, index(0, 1), target, index(*dst))
        assert np.array_equal(rows_of(rows, values), values)
