"""Matrices that are repacked: products against numpy, and everything else refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import gguf
import numpy as np
import pytest
from support.cpu_graph import Bench
from support.nmse import nmse

from pykv.errors import TensorError
from pykv.ggml import Arena, Backend, Buffer, DType, Graph, Sched, Tensor, can_repack, cpu_device, from_float, ops
from pykv.ggml.tensor_rows import copy_rows, move_rows, read_rows, write_rows

RNG = np.random.default_rng(9)
CPU = cpu_device()
F32, Q4_0 = DType.F32, DType.Q4_0

TYPES = [dtype for dtype in DType if can_repack(CPU, dtype, (256, 64))]
"""What this CPU repacks, perhaps nothing; whoever multiplies must not see a difference."""

ACTIVATION_NMSE = 2e-4
"""Activations are rounded to 8 bits, as in all products with quantised matrices."""


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


class Repacked(Bench):
    """A bench one of whose operands is repacked, if this CPU can do that."""

    def put_matrix(self, values: np.ndarray, dtype: DType) -> Tensor:
        ne = tuple(reversed(values.shape))
        kind = CPU.repack_type if can_repack(CPU, dtype, ne) else None
        arena = Arena(1, is_repacked=kind is not None)
        tensor = arena.tensor(dtype, ne, "matrix")
        buffer = Buffer.allocate(arena, kind or CPU.buffer_type, "a matrix")
        buffer.adopt(tensor).set(from_float(dtype, values))
        buffer.mark_weights()
        return tensor


def held(values: np.ndarray, dtype: DType) -> np.ndarray:
    raw = from_float(dtype, values).reshape(*values.shape[:-1], -1)
    return gguf.dequantize(raw, gguf.GGMLQuantizationType(int(dtype)))


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (7,), (33,), (1, 5), (4, 2), (5, 3)], ids=str)
@pytest.mark.parametrize("n_rows", [8, 64, 200])
def test_products_are_those_of_numpy(n_rows: int, shape: tuple[int, ...], n_threads: int) -> None:
    """Columns come in fours and one by one; several planes of them, too."""
    for dtype in (*TYPES, Q4_0):
        a, b = normal(n_rows, 256), normal(*reversed(shape), 256)
        bench = Repacked(n_threads=n_threads)
        out = ops.mul_mat(bench.nodes, bench.put_matrix(a, dtype), bench.put(b))
        with bench.computed(out):
            found = out.numpy()
        expected = b.reshape(-1, 256) @ held(a, dtype).T
        assert nmse(found.reshape(expected.shape), expected) < ACTIVATION_NMSE, dtype.label


@pytest.mark.parametrize(("n_columns", "n_tokens"), [(1, 1), (1, 9), (2, 6)])
def test_products_with_experts_are_those_of_numpy(n_columns: int, n_tokens: int) -> None:
    n_used, n_expert = 2, 5
    for dtype in (*TYPES, Q4_0):
        a, b = normal(n_expert, 16, 256), normal(n_tokens, n_columns, 256)
        index = np.argsort(RNG.random((n_tokens, n_expert)), axis=1)[:, :n_used].astype(np.int32)
        bench = Repacked()
        out = ops.mul_mat_id(bench.nodes, bench.put_matrix(a, dtype), bench.put(b), bench.put(index))
        with bench.computed(out):
            found = out.numpy()[0]
        chosen = held(a, dtype)[index]
        expected = np.einsum("tumk,tuk->tum", chosen, np.broadcast_to(b, (n_tokens, n_used, 256)))
        assert nmse(found, expected) < ACTIVATION_NMSE, dtype.label


def test_what_can_be_repacked_is_what_has_a_device_whole_blocks_and_rows() -> None:
    for dtype in DType:
        for ne in ((256,), (256, 7), (256, 8, 2, 2)):
            assert not can_repack(CPU, dtype, ne)
    assert not can_repack(CPU, F32, (256, 64))
    assert (CPU.repack_type is not None) or not TYPES


def test_arenas_and_memory_that_repacks_go_together() -> None:
    kind = CPU.repack_type
    if kind is None:
        return
    assert kind.repacks
    assert not CPU.buffer_type.repacks
    plain, repacked = Arena(1), Arena(1, is_repacked=True)
    for arena in (plain, repacked):
        arena.tensor(Q4_0, (64, 64))
    with pytest.raises(TensorError, match="CPU_REPACK"):
        Buffer.allocate(plain, kind, "a test")
    with pytest.raises(TensorError, match="is_repacked=True"):
        Buffer.allocate(repacked, CPU.buffer_type, "a test")
    with pytest.raises(TensorError, match="memory that repacks"):
        Buffer.wrap(repacked, CPU, np.zeros(8192, np.uint8)[:4096], 4096)
    with pytest.raises(TensorError, match="graph_size=4"):
        Arena(1, 4, is_repacked=True)


REFUSED: dict[str, Callable[[Arena, Tensor, Callable[..., Tensor]], object]] = {
    "numpy": lambda a, w, t: w.numpy(),
    "to_f32": lambda a, w, t: w.to_f32(),
    "raw_bytes": lambda a, w, t: w.raw_bytes(),
    "get_into": lambda a, w, t: w.get_into(np.empty(w.nbytes, np.uint8)),
    "a part set": lambda a, w, t: w.set(np.zeros(w.nbytes // 2, np.uint8)),
    "an end set": lambda a, w, t: w.set(np.zeros(w.nbytes // 2, np.uint8), w.nbytes // 2),
    "copy_rows": lambda a, w, t: copy_rows(w, np.array([0]), np.array([1])),
    "read_rows": lambda a, w, t: read_rows(w, np.array([0])),
    "write_rows": lambda a, w, t: write_rows(w, np.array([0]), np.zeros((1, Q4_0.row_size(64)), np.uint8)),
    "move_rows": lambda a, w, t: move_rows(w, np.array([0]), w, np.array([1])),
    "view": lambda a, w, t: ops.view(a, w, (64, 8, 1, 1), w.nb[1:]),
    "reshape": lambda a, w, t: ops.reshape(a, w, 128, 32),
    "cont": lambda a, w, t: ops.cont(a, w),
    "cast": lambda a, w, t: ops.cast(a, w, F32),
    "cpy to": lambda a, w, t: ops.cpy(a, t(F32, 64, 64), w),
    "get_rows": lambda a, w, t: ops.get_rows(a, w, t(DType.I32, 1)),
    "set_rows": lambda a, w, t: ops.set_rows(a, w, t(F32, 64, 1), t(DType.I64, 1)),
    "strided columns": lambda a, w, t: ops.mul_mat(a, w, ops.view(a, t(F32, 128, 8), (64, 8, 1, 1), (512, 4096, 4096))),
    "f16 columns": lambda a, w, t: ops.mul_mat(a, w, t(DType.F16, 64, 8)),
    "four dims": lambda a, w, t: ops.mul_mat(a, w, t(F32, 64, 2, 2, 2)),
    "a node in its arena": lambda a, w, t: ops.mul_mat(w.arena, w, t(F32, 64, 2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_but_a_product_can_use_it(name: str) -> None:
    kind = CPU.repack_type
    if kind is None or not can_repack(CPU, Q4_0, (64, 64)):
        return
    matrices, nodes = Arena(2, is_repacked=True), Arena(16, 16)
    matrix = matrices.tensor(Q4_0, (64, 64), "the matrix")
    buffer = Buffer.allocate(matrices, kind, "a test")
    buffer.adopt(matrix).fill(0)
    with pytest.raises(TensorError, match="repacked"):
        REFUSED[name](nodes, matrix, lambda dtype, *ne: nodes.tensor(dtype, ne))


def test_a_host_view_is_refused() -> None:
    bench = Repacked()
    matrix = bench.put_matrix(normal(64, 64), Q4_0)
    assert matrix.owner is not None
    with pytest.raises(TensorError, match="no host view"):
        matrix.owner.host_view(matrix)


def test_the_matrix_lives_as_long_as_a_graph_that_multiplies_with_it() -> None:
    bench = Repacked()
    values = normal(64, 64)
    x = bench.nodes.tensor(F32, (64, 4)).as_input()
    out = ops.mul_mat(bench.nodes, bench.put_matrix(values, Q4_0), x).as_output()
    graph = Graph(bench.nodes)
    graph.expand(out)
    with ExitStack() as stack:
        sched = stack.enter_context(Sched([stack.enter_context(Backend(CPU, 1))], 64))
        sched.allocate(graph)
        columns = normal(4, 64)
        x.set(columns)
        sched.compute(graph)
        assert nmse(out.numpy()[0, 0], columns @ held(values, Q4_0).T) < ACTIVATION_NMSE
