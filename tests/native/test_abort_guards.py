"""Each guard twice: the raw call ends the process, pykv's raises. One fork for each raw call."""

from __future__ import annotations

import mmap
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from support.guard import DEADLY, Guard, check_guard
from support.mortal import Mortal

from pykv.errors import PykvError, TensorError
from pykv.ggml import (
    Arena,
    Backend,
    Buffer,
    DType,
    Graph,
    GraphInput,
    RopeParams,
    Sched,
    Tensor,
    cpu_device,
    from_float,
    ops,
)
from pykv.gguf import GGUFFile

pytestmark = pytest.mark.abort

CPU = cpu_device()


def _misaligned() -> np.ndarray:
    room = np.zeros(4096, np.uint8)
    return room[1 - room.ctypes.data % 64 + 64 :][:1024]


def _computed_twice(a: Arena) -> None:
    graph = Graph(a)
    graph.expand(ops.tanh(a, a.tensor(DType.F32, (4,))))
    with Backend(CPU, 1) as backend, Sched([backend], 64) as sched:
        sched.allocate(graph)
        sched.allocate(graph)


def _too_many_leaves(a: Arena) -> None:
    small, lender = Arena(8, 2), Arena(8)
    x = lender.tensor(DType.F32, (4,))
    for _ in range(2):
        x = ops.add(small, x, lender.tensor(DType.F32, (4,)))
    Graph(small).expand(x)


def _too_many_nodes(a: Arena) -> None:
    small = Arena(8, 2)
    x = small.tensor(DType.F32, (4,))
    for _ in range(3):
        x = ops.tanh(small, x)
    Graph(small).expand(x)


def _sched_too_small(a: Arena) -> None:
    with Backend(CPU, 1) as backend, Sched([backend], 3) as sched:
        x = a.tensor(DType.F32, (4,))
        for _ in range(20):
            x = ops.tanh(a, x)
        graph = Graph(a)
        graph.expand(x)
        sched.allocate(graph)


def _read_row(a: Arena, row: int) -> None:
    index = a.tensor(DType.I32, (1,))
    graph = Graph(a)
    graph.expand(ops.get_rows(a, a.tensor(DType.F32, (4, 3)), index))
    with Backend(CPU, 1) as backend, Sched([backend], 64) as sched:
        sched.allocate(graph)
        index.set(np.array([row], np.int32))


def _write_row(a: Arena, row: int) -> None:
    index = GraphInput(a.tensor(DType.I64, (1,)))
    graph = Graph(a)
    graph.expand(ops.set_rows(a, a.tensor(DType.F32, (4, 3)), a.tensor(DType.F32, (4, 1)), index.tensor))
    with Backend(CPU, 1) as backend, Sched([backend], 64) as sched:
        sched.allocate(graph)
        index.bind()
        index.array[...] = row
        sched.compute(graph)


def _placed(x: Tensor) -> Buffer:
    return Buffer.wrap(x.arena, CPU, mmap.mmap(-1, 4096), 4096)


F32, F16, I32, I64, Q8_0 = DType.F32, DType.F16, DType.I32, DType.I64, DType.Q8_0

BUILDING: dict[str, Guard] = {
    "arena overflow": (
        "c = context(1); tensor(c, F32, 1); tensor(c, F32, 1)",
        lambda a, t: [Arena(1).tensor(F32, (1,)).arena.tensor(F32, (1,))],
    ),
    "five dims": ("tensor(context(), F32, 1, 1, 1, 1, 1)", lambda a, t: t(F32, 1, 1, 1, 1, 1)),
    "no dims": ("tensor(context(), F32)", lambda a, t: t(F32)),
    "add, not a tiling": (
        "c = context(); lib.ggml_add(c, tensor(c, F32, 4), tensor(c, F32, 3))",
        lambda a, t: ops.add(a, t(F32, 4), t(F32, 3)),
    ),
    "mul, not a tiling": (
        "c = context(); lib.ggml_mul(c, tensor(c, F32, 4), tensor(c, F32, 8))",
        lambda a, t: ops.mul(a, t(F32, 4), t(F32, 8)),
    ),
    "scale of a transposed tensor": (
        "c = context(); lib.ggml_scale_bias(c, lib.ggml_transpose(c, tensor(c, F32, 4, 3)), 2.0, 0.0)",
        lambda a, t: ops.scale(a, ops.transpose(a, t(F32, 4, 3)), 2.0),
    ),
    "scale of odd strides": (
        "c = context(); x = tensor(c, F32, 4, 1, 5, 1);"
        "lib.ggml_scale_bias(c, lib.ggml_permute(c, x, 0, 2, 1, 3), 2.0, 0.0)",
        lambda a, t: ops.scale(a, ops.permute(a, t(F32, 4, 1, 5, 1), 0, 2, 1, 3), 2.0),
    ),
    "tanh of a transposed tensor": (
        "c = context(); lib.ggml_tanh(c, lib.ggml_transpose(c, tensor(c, F32, 4, 3)))",
        lambda a, t: ops.tanh(a, ops.transpose(a, t(F32, 4, 3))),
    ),
    "swiglu of two shapes": (
        "c = context(); lib.ggml_swiglu_split(c, tensor(c, F32, 4), tensor(c, F32, 3))",
        lambda a, t: ops.swiglu(a, t(F32, 4), t(F32, 3)),
    ),
    "swiglu of two types": (
        "c = context(); lib.ggml_swiglu_split(c, tensor(c, F32, 4), tensor(c, F16, 4))",
        lambda a, t: ops.swiglu(a, t(F32, 4), t(F16, 4)),
    ),
    "swiglu of a transposed tensor": (
        "c = context(); x = lib.ggml_transpose(c, tensor(c, F32, 4, 4)); lib.ggml_swiglu_split(c, x, x)",
        lambda a, t: ops.swiglu(a, ops.transpose(a, t(F32, 4, 4)), t(F32, 4, 4)),
    ),
    "mul_mat of two lengths": (
        "c = context(); lib.ggml_mul_mat(c, tensor(c, F32, 4, 3), tensor(c, F32, 5, 3))",
        lambda a, t: ops.mul_mat(a, t(F32, 4, 3), t(F32, 5, 3)),
    ),
    "mul_mat of a transposed first": (
        "c = context(); x = tensor(c, F32, 4, 4); lib.ggml_mul_mat(c, lib.ggml_transpose(c, x), x)",
        lambda a, t: ops.mul_mat(a, ops.transpose(a, t(F32, 4, 4)), t(F32, 4, 4)),
    ),
    "reshape to another count": (
        "c = context(); lib.ggml_reshape_2d(c, tensor(c, F32, 6), 2, 4)",
        lambda a, t: ops.reshape(a, t(F32, 6), 2, 4),
    ),
    "reshape of a transposed tensor": (
        "c = context(); lib.ggml_reshape_1d(c, lib.ggml_transpose(c, tensor(c, F32, 2, 3)), 6)",
        lambda a, t: ops.reshape(a, ops.transpose(a, t(F32, 2, 3)), 6),
    ),
    "view past the end": (
        "c = context(); lib.ggml_view_4d(c, tensor(c, F32, 6), 6, 1, 1, 1, 24, 24, 24, 4)",
        lambda a, t: ops.view(a, t(F32, 6), (6, 1, 1, 1), (24, 24, 24), 4),
    ),
    "view of more elements than there are": (
        "c = context(); lib.ggml_view_4d(c, tensor(c, F32, 6), 6, 2, 1, 1, 0, 0, 0, 0)",
        lambda a, t: ops.view(a, t(F32, 6), (6, 2, 1, 1), (0, 0, 0)),
    ),
    "permute by one axis twice": (
        "c = context(); lib.ggml_permute(c, tensor(c, F32, 6), 0, 0, 1, 2)",
        lambda a, t: ops.permute(a, t(F32, 6), 0, 0, 1, 2),
    ),
    "permute by axis 4": (
        "c = context(); lib.ggml_permute(c, tensor(c, F32, 6), 0, 1, 2, 4)",
        lambda a, t: ops.permute(a, t(F32, 6), 0, 1, 2, 4),
    ),
    "get_rows by i64": (
        "c = context(); lib.ggml_get_rows(c, tensor(c, F32, 4, 3), tensor(c, I64, 2))",
        lambda a, t: ops.get_rows(a, t(F32, 4, 3), t(I64, 2)),
    ),
    "get_rows of other streams": (
        "c = context(); lib.ggml_get_rows(c, tensor(c, F32, 4, 3, 2), tensor(c, I32, 2))",
        lambda a, t: ops.get_rows(a, t(F32, 4, 3, 2), t(I32, 2)),
    ),
    "set_rows of another width": (
        "c = context(); lib.ggml_set_rows(c, tensor(c, F32, 4, 3), tensor(c, F32, 5, 2), tensor(c, I64, 2))",
        lambda a, t: ops.set_rows(a, t(F32, 4, 3), t(F32, 5, 2), t(I64, 2)),
    ),
    "set_rows of i32": (
        "c = context(); lib.ggml_set_rows(c, tensor(c, F32, 4, 3), tensor(c, I32, 4, 2), tensor(c, I64, 2))",
        lambda a, t: ops.set_rows(a, t(F32, 4, 3), t(I32, 4, 2), t(I64, 2)),
    ),
    "set_rows into a transposed tensor": (
        "c = context(); x = lib.ggml_transpose(c, tensor(c, F32, 4, 4));"
        "lib.ggml_set_rows(c, x, tensor(c, F32, 4, 2), tensor(c, I64, 2))",
        lambda a, t: ops.set_rows(a, ops.transpose(a, t(F32, 4, 4)), t(F32, 4, 2), t(I64, 2)),
    ),
    "soft_max with a narrow mask": (
        "c = context(); lib.ggml_soft_max_ext(c, tensor(c, F32, 8, 2), tensor(c, F32, 7, 2), 1.0, 0.0)",
        lambda a, t: ops.soft_max(a, t(F32, 8, 2), t(F32, 7, 2), 1.0),
    ),
    "soft_max of a transposed tensor": (
        "c = context(); x = tensor(c, F32, 4, 4);lib.ggml_soft_max_ext(c, lib.ggml_transpose(c, x), x, 1.0, 0.0)",
        lambda a, t: ops.soft_max(a, ops.transpose(a, t(F32, 4, 4)), t(F32, 4, 4), 1.0),
    ),
    "out_prod of different numbers of columns": (
        "c = context(); lib.ggml_out_prod(c, tensor(c, F32, 8, 2), tensor(c, F32, 1, 3))",
        lambda a, t: ops.out_prod(a, t(F32, 8, 2), t(F32, 1, 3)),
    ),
    "out_prod of a transposed tensor": (
        "c = context(); lib.ggml_out_prod(c, lib.ggml_transpose(c, tensor(c, F32, 2, 8)), tensor(c, F32, 1, 2))",
        lambda a, t: ops.out_prod(a, ops.transpose(a, t(F32, 2, 8)), t(F32, 1, 2)),
    ),
    "column_max of more than floats count": (
        "c = context(); x = tensor(c, F32, 1, 2**24 + 1);"
        "lib.ggml_pool_2d(c, x, lib.GGML_OP_POOL_MAX, 1, 2**24 + 3, 1, 1, 0, 0)",
        lambda a, t: ops.column_max(a, t(F32, 1, 2**24 + 1)),
    ),
    "rope with too few positions": (
        "c = context(); lib.ggml_rope_ext(c, tensor(c, F32, 8, 1, 3), tensor(c, I32, 2), ffi.NULL,"
        " 8, 0, 0, 1e4, 1, 0, 1, 32, 1)",
        lambda a, t: ops.rope(a, t(F32, 8, 1, 3), t(I32, 2), RopeParams(8)),
    ),
    "rope with too few factors": (
        "c = context(); lib.ggml_rope_ext(c, tensor(c, F32, 8, 1, 3), tensor(c, I32, 3), tensor(c, F32, 3),"
        " 8, 0, 0, 1e4, 1, 0, 1, 32, 1)",
        lambda a, t: ops.rope(a, t(F32, 8, 1, 3), t(I32, 3), RopeParams(8), t(F32, 3)),
    ),
    "flash_attn with an f32 mask": (
        "c = context(); lib.ggml_flash_attn_ext(c, tensor(c, F32, 32, 1, 2), tensor(c, F16, 32, 8, 2),"
        " tensor(c, F16, 32, 8, 2), tensor(c, F32, 8, 1), 1.0, 0.0, 0.0)",
        lambda a, t: ops.flash_attn(a, t(F32, 32, 1, 2), t(F16, 32, 8, 2), t(F16, 32, 8, 2), t(F32, 8, 1), scale=1.0),
    ),
    "graph with too many nodes": (
        "c = context(); x = tensor(c, F32, 4)\nfor _ in range(3): x = lib.ggml_tanh(c, x)\ngraph_of(x, size=2)",
        lambda a, t: _too_many_nodes(a),
    ),
    "graph with too many leaves": (
        "c = context(); x = tensor(c, F32, 4)\n"
        "for _ in range(2): x = lib.ggml_add(c, x, tensor(c, F32, 4))\ngraph_of(x, size=2)",
        lambda a, t: _too_many_leaves(a),
    ),
    "two graphs in one arena": (
        "c = context(1, 8); lib.ggml_new_graph_custom(c, 8, False); lib.ggml_new_graph_custom(c, 8, False)",
        lambda a, t: [Graph(a), Graph(a)],
    ),
    "a sched without backends": ("schedule()", lambda a, t: Sched([], 64)),
    "writing without memory": (
        "x = tensor(context(), F32, 4); lib.ggml_backend_tensor_set(x, ffi.new('float[4]'), 0, 16)",
        lambda a, t: t(F32, 4).set(np.zeros(4, np.float32)),
    ),
    "reading without memory": (
        "x = tensor(context(), F32, 4); lib.ggml_backend_tensor_get(x, ffi.new('float[4]'), 0, 16)",
        lambda a, t: t(F32, 4).numpy(),
    ),
    "reading past the end": (
        "c = context(); x = tensor(c, F32, 4); place(c);lib.ggml_backend_tensor_get(x, ffi.new('float[5]'), 0, 20)",
        lambda a, t: [x := t(F32, 4), _placed(x).place(x, 0), x.get_into(np.zeros(5, np.float32))],
    ),
    "placing past the end": (
        "c = context(); x = tensor(c, F32, 4); m = ffi.new('char[4096]'); b = cpu();"
        "b = lib.ggml_backend_dev_buffer_from_host_ptr(lib.ggml_backend_get_device(b), m + (-int(ffi.cast('long', m)))"
        " % 64, 1024, 1024); lib.ggml_backend_tensor_alloc(b, x, lib.ggml_backend_buffer_get_base(b) + 1020)",
        lambda a, t: [x := t(F32, 4), _placed(x).place(x, 4084)],
    ),
    "placing twice": (
        "c = context(); x = tensor(c, F32, 4); b = place(c);"
        "lib.ggml_backend_tensor_alloc(b, x, lib.ggml_backend_buffer_get_base(b))",
        lambda a, t: [x := t(F32, 4), b := _placed(x), b.place(x, 0), b.place(x, 0)],
    ),
    "placing a view": (
        "c = context(); x = tensor(c, F32, 4); b = place(c); v = lib.ggml_reshape_2d(c, x, 2, 2);"
        "lib.ggml_backend_tensor_alloc(b, v, lib.ggml_backend_buffer_get_base(b))",
        lambda a, t: [x := t(F32, 4), _placed(x).place(ops.reshape(a, x, 2, 2), 0)],
    ),
    "wrapping a misaligned address": (
        "m = ffi.new('char[256]'); d = lib.ggml_backend_get_device(cpu());"
        "lib.ggml_backend_dev_buffer_from_host_ptr(d, m + 1 + (-int(ffi.cast('long', m))) % 64, 64, 64)",
        lambda a, t: Buffer.wrap(a, CPU, _misaligned(), 64),
    ),
    "memory for a view of nothing": (
        "b, c = context(), context(); lib.ggml_reshape_2d(c, tensor(b, F32, 4), 2, 2); tensor(c, F32, 4); place(c)",
        lambda a, t: [
            ops.reshape(a, Arena(1).tensor(F32, (4,)), 2, 2),
            t(F32, 4),
            Buffer.allocate(a, CPU.buffer_type, "test"),
        ],
    ),
    "f32 to a type without its tables": (
        "lib.pykv_from_float(lib.GGML_TYPE_IQ3_XXS, ffi.new('float[256]', [1.0] * 256), ffi.new('char[1024]'), 256)",
        lambda a, t: from_float(DType.IQ3_XXS, np.ones(256, np.float32)),
    ),
}

COMPUTING: dict[str, Guard] = {
    "add of i32": (
        "c = context(); compute(c, lib.ggml_add(c, tensor(c, I32, 4), tensor(c, I32, 4)))",
        lambda a, t: ops.add(a, t(I32, 4), t(I32, 4)),
    ),
    "add of f32 and f16": (
        "c = context(); compute(c, lib.ggml_add(c, tensor(c, F32, 4), tensor(c, F16, 4)))",
        lambda a, t: ops.add(a, t(F32, 4), t(F16, 4)),
    ),
    "mul of a transposed first": (
        "c = context(); compute(c, lib.ggml_mul(c, lib.ggml_transpose(c, tensor(c, F32, 4, 4)), tensor(c, F32, 4, 4)))",
        lambda a, t: ops.mul(a, ops.transpose(a, t(F32, 4, 4)), t(F32, 4, 4)),
    ),
    "scale of f16": (
        "c = context(); compute(c, lib.ggml_scale_bias(c, tensor(c, F16, 4), 2.0, 0.0))",
        lambda a, t: ops.scale(a, t(F16, 4), 2.0),
    ),
    "scale of rows with gaps": (
        "c = context(); v = lib.ggml_view_4d(c, tensor(c, F32, 4, 3), 2, 3, 1, 1, 16, 48, 48, 0);"
        "compute(c, lib.ggml_scale_bias(c, v, 2.0, 0.0))",
        lambda a, t: ops.scale(a, ops.view(a, t(F32, 4, 3), (2, 3, 1, 1), (16, 48, 48)), 2.0),
    ),
    "tanh of i32": (
        "c = context(); compute(c, lib.ggml_tanh(c, tensor(c, I32, 4)))",
        lambda a, t: ops.tanh(a, t(I32, 4)),
    ),
    "tanh of single elements far apart": (
        "c = context(); compute(c, lib.ggml_tanh(c, lib.ggml_permute(c, tensor(c, F32, 4, 1), 1, 0, 2, 3)))",
        lambda a, t: ops.tanh(a, ops.permute(a, t(F32, 4, 1), 1, 0, 2, 3)),
    ),
    "rms_norm of f16": (
        "c = context(); compute(c, lib.ggml_rms_norm(c, tensor(c, F16, 4), 1e-5))",
        lambda a, t: ops.rms_norm(a, t(F16, 4), 1e-5),
    ),
    "rms_norm of a transposed tensor": (
        "c = context(); compute(c, lib.ggml_rms_norm(c, lib.ggml_transpose(c, tensor(c, F32, 4, 4)), 1e-5))",
        lambda a, t: ops.rms_norm(a, ops.transpose(a, t(F32, 4, 4)), 1e-5),
    ),
    "rms_norm with a negative eps": (
        "c = context(); compute(c, lib.ggml_rms_norm(c, tensor(c, F32, 4), -1e-5))",
        lambda a, t: ops.rms_norm(a, t(F32, 4), -1e-5),
    ),
    "rms_norm with an eps of nan": (
        "c = context(); compute(c, lib.ggml_rms_norm(c, tensor(c, F32, 4), float('nan')))",
        lambda a, t: ops.rms_norm(a, t(F32, 4), float("nan")),
    ),
    "swiglu of i32": (
        "c = context(); x = tensor(c, I32, 4); compute(c, lib.ggml_swiglu_split(c, x, x))",
        lambda a, t: ops.swiglu(a, t(I32, 4), t(I32, 4)),
    ),
    "mul_mat of i32 weights": (
        "c = context(); compute(c, lib.ggml_mul_mat(c, tensor(c, I32, 4, 4), tensor(c, F32, 4, 4)))",
        lambda a, t: ops.mul_mat(a, t(I32, 4, 4), t(F32, 4, 4)),
    ),
    "mul_mat of q8_1 weights": (
        "c = context(); compute(c, lib.ggml_mul_mat(c, tensor(c, Q8_1, 32, 4), tensor(c, F32, 32, 4)))",
        lambda a, t: ops.mul_mat(a, t(DType.Q8_1, 32, 4), t(F32, 32, 4)),
    ),
    "mul_mat by a transposed second": (
        "c = context(); x = tensor(c, F32, 4, 4); compute(c, lib.ggml_mul_mat(c, x, lib.ggml_transpose(c, x)))",
        lambda a, t: ops.mul_mat(a, t(F32, 4, 4), ops.transpose(a, t(F32, 4, 4))),
    ),
    "cast of q8_0 to f16": (
        "c = context(); compute(c, lib.ggml_cast(c, tensor(c, Q8_0, 32), F16))",
        lambda a, t: ops.cast(a, t(Q8_0, 32), F16),
    ),
    "cast of f32 to i8": (
        "c = context(); compute(c, lib.ggml_cast(c, tensor(c, F32, 32), I8))",
        lambda a, t: ops.cast(a, t(F32, 32), DType.I8),
    ),
    "cast of a transposed tensor to q8_0": (
        "c = context(); compute(c, lib.ggml_cast(c, lib.ggml_transpose(c, tensor(c, F32, 32, 32)), Q8_0))",
        lambda a, t: ops.cast(a, ops.transpose(a, t(F32, 32, 32)), Q8_0),
    ),
    "pad of f16": (
        "c = context(); compute(c, lib.ggml_pad(c, tensor(c, F16, 4), 1, 0, 0, 0))",
        lambda a, t: ops.pad(a, t(F16, 4), 1),
    ),
    "get_rows of i64": (
        "c = context(); compute(c, lib.ggml_get_rows(c, tensor(c, I64, 4, 3), tensor(c, I32, 2)))",
        lambda a, t: ops.get_rows(a, t(I64, 4, 3), t(I32, 2)),
    ),
    "get_rows of q8_1": (
        "c = context(); compute(c, lib.ggml_get_rows(c, tensor(c, Q8_1, 32, 3), tensor(c, I32, 2)))",
        lambda a, t: ops.get_rows(a, t(DType.Q8_1, 32, 3), t(I32, 2)),
    ),
    "set_rows into i8": (
        "c = context();compute(c, lib.ggml_set_rows(c, tensor(c, I8, 4, 3), tensor(c, F32, 4, 2), tensor(c, I64, 2)))",
        lambda a, t: ops.set_rows(a, t(DType.I8, 4, 3), t(F32, 4, 2), t(I64, 2)),
    ),
    "soft_max of f16": (
        "c = context(); compute(c, lib.ggml_soft_max_ext(c, tensor(c, F16, 8), tensor(c, F32, 8), 1.0, 0.0))",
        lambda a, t: ops.soft_max(a, t(F16, 8), t(F32, 8), 1.0),
    ),
    "out_prod of bf16": (
        "c = context(); compute(c, lib.ggml_out_prod(c, tensor(c, BF16, 8, 2), tensor(c, F32, 1, 2)))",
        lambda a, t: ops.out_prod(a, t(DType.BF16, 8, 2), t(F32, 1, 2)),
    ),
    "rope of bf16": (
        "c = context(); compute(c, lib.ggml_rope_ext(c, tensor(c, BF16, 8, 1, 3), tensor(c, I32, 3), ffi.NULL,"
        " 8, 0, 0, 1e4, 1, 0, 1, 32, 1))",
        lambda a, t: ops.rope(a, t(DType.BF16, 8, 1, 3), t(I32, 3), RopeParams(8)),
    ),
    "rope of an odd number of dims": (
        "c = context(); compute(c, lib.ggml_rope_ext(c, tensor(c, F32, 8, 1, 3), tensor(c, I32, 3), ffi.NULL,"
        " 7, 0, 0, 1e4, 1, 0, 1, 32, 1))",
        lambda a, t: ops.rope(a, t(F32, 8, 1, 3), t(I32, 3), RopeParams(7)),
    ),
    "rope of more dims than there are": (
        "c = context(); compute(c, lib.ggml_rope_ext(c, tensor(c, F32, 8, 1, 3), tensor(c, I32, 3), ffi.NULL,"
        " 10, 0, 0, 1e4, 1, 0, 1, 32, 1))",
        lambda a, t: ops.rope(a, t(F32, 8, 1, 3), t(I32, 3), RopeParams(10)),
    ),
    "rope of rows that are not dense": (
        "c = context(); x = lib.ggml_permute(c, tensor(c, F32, 2, 8, 3), 1, 0, 2, 3);"
        "compute(c, lib.ggml_rope_ext(c, x, tensor(c, I32, 3), ffi.NULL, 8, 0, 0, 1e4, 1, 0, 1, 32, 1))",
        lambda a, t: ops.rope(a, ops.permute(a, t(F32, 2, 8, 3), 1, 0, 2, 3), t(I32, 3), RopeParams(8)),
    ),
    "rope of an unknown kind": (
        "c = context(); compute(c, lib.ggml_rope_ext(c, tensor(c, F32, 8, 1, 3), tensor(c, I32, 3), ffi.NULL,"
        " 8, 4, 0, 1e4, 1, 0, 1, 32, 1))",
        lambda a, t: ops.rope(a, t(F32, 8, 1, 3), t(I32, 3), RopeParams(8, "other")),
    ),
    "flash_attn over i32 keys": (
        "c = context(); compute(c, lib.ggml_flash_attn_ext(c, tensor(c, F32, 32, 1, 2), tensor(c, I32, 32, 8, 2),"
        " tensor(c, F16, 32, 8, 2), tensor(c, F16, 8, 1), 1.0, 0.0, 0.0))",
        lambda a, t: ops.flash_attn(a, t(F32, 32, 1, 2), t(I32, 32, 8, 2), t(F16, 32, 8, 2), t(F16, 8, 1), scale=1.0),
    ),
    "flash_attn over keys that are not dense": (
        "c = context(); k = lib.ggml_permute(c, tensor(c, F16, 8, 32, 2), 1, 0, 2, 3);"
        "compute(c, lib.ggml_flash_attn_ext(c, tensor(c, F32, 32, 1, 2), k,"
        " tensor(c, F16, 32, 8, 2), tensor(c, F16, 8, 1), 1.0, 0.0, 0.0))",
        lambda a, t: ops.flash_attn(
            a,
            t(F32, 32, 1, 2),
            ops.permute(a, t(F16, 8, 32, 2), 1, 0, 2, 3),
            t(F16, 32, 8, 2),
            t(F16, 8, 1),
            scale=1.0,
        ),
    ),
    "reading a row that does not exist": (
        "c = context(); i = tensor(c, I32, 1); x = lib.ggml_get_rows(c, tensor(c, F32, 4, 3), i);"
        "compute(c, x, lambda: lib.ggml_backend_tensor_set(i, ffi.new('int32_t *', 3), 0, 4))",
        lambda a, t: _read_row(a, 3),
    ),
    "writing a row that does not exist": (
        "c = context(); i = tensor(c, I64, 1);"
        "x = lib.ggml_set_rows(c, tensor(c, F32, 4, 3), tensor(c, F32, 4, 1), i);"
        "compute(c, x, lambda: lib.ggml_backend_tensor_set(i, ffi.new('int64_t *', -1), 0, 8))",
        lambda a, t: _write_row(a, -1),
    ),
    "allocating twice": (
        "c = context(); g = graph_of(lib.ggml_tanh(c, tensor(c, F32, 4))); s = schedule(cpu())\n"
        "for _ in range(2): lib.ggml_backend_sched_alloc_graph(s, g)",
        lambda a, t: _computed_twice(a),
    ),
    "a graph larger than its scheduler": (
        "c = context(); x = tensor(c, F32, 4)\nfor _ in range(20): x = lib.ggml_tanh(c, x)\n"
        "lib.ggml_backend_sched_alloc_graph(schedule(cpu(), graph_size=3), graph_of(x))",
        lambda a, t: _sched_too_small(a),
    ),
}

GUARDS = BUILDING | COMPUTING


@pytest.fixture(scope="module")
def mortal() -> Iterator[Mortal]:
    with Mortal() as process:
        yield process


def test_the_forking_process_lets_sound_code_live(mortal):
    code = "c = context(); compute(c, lib.ggml_add(c, tensor(c, F32, 4), tensor(c, F32, 4)))"
    assert mortal.run(code).signal == 0
    assert mortal.run(code).status == 0
    assert mortal.run("raise ValueError('x')").status == 1


@pytest.mark.parametrize("name", GUARDS)
def test_the_raw_call_dies_and_pykv_raises(mortal, name):
    check_guard(mortal, GUARDS[name])


def test_a_fatal_message_is_written_before_the_end(mortal):
    death = mortal.run("tensor(context(), F32)")
    assert death.signal == signal.SIGABRT
    assert "pykv: fatal error inside ggml, the process ends: " in death.stderr
    assert "GGML_ASSERT(n_dims >= 1" in death.stderr


def test_writing_to_a_read_only_mapping(mortal, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    death = mortal.run(f"""
        import mmap
        f = open({str(path)!r}, "rb")
        m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        d = lib.ggml_backend_get_device(cpu())
        b = lib.ggml_backend_dev_buffer_from_host_ptr(d, ffi.from_buffer(m), 4096, 4096)
        lib.ggml_backend_buffer_clear(b, 0)
    """)
    assert death.signal in DEADLY, death
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with Buffer.wrap(Arena(1), CPU, mapped, 4096) as buffer, pytest.raises(TensorError, match="read-only"):
        buffer.clear()


@pytest.mark.parametrize(
    "call",
    [
        "gguf_get_val_str(g, k)",
        "gguf_get_arr_type(g, k)",
        "gguf_get_arr_str(g, k, 0)",
    ],
)
def test_reading_metadata_as_another_type(mortal, tiny_llama_path, call):
    death = mortal.run(f"""
        params = ffi.new("struct gguf_init_params *", {{"no_alloc": True, "ctx": ffi.NULL}})
        g = lib.gguf_init_from_file({str(tiny_llama_path)!r}.encode(), params[0])
        k = lib.gguf_find_key(g, b"llama.block_count")
        lib.{call}
    """)
    assert death.signal in DEADLY
    with GGUFFile(tiny_llama_path) as file, pytest.raises(PykvError, match=r"'llama.block_count' holds int"):
        file.metadata.typed("llama.block_count", str)
