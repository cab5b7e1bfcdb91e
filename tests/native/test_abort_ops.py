"""Guards of single operations: the raw call ends the process, pykv's raises. One fork for each raw call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.guard import Guard, check_guard
from support.mortal import Mortal

from pykv.ggml import Arena, Backend, DType, Graph, RopeParams, Sched, Tensor, cpu_device, ops

pytestmark = pytest.mark.abort

F32, F16, I32, I64, Q8_0 = DType.F32, DType.F16, DType.I32, DType.I64, DType.Q8_0

# operations of many operands, raw and guarded, with what varies
ROPE_MULTI = (
    "lib.ggml_rope_multi(c, tensor(c, F32, 8, 1, 3), tensor(c, I32, {pos}), ffi.NULL, 8, ffi.new('int[4]', {sections}),"
    " lib.GGML_ROPE_TYPE_MROPE, 0, 1e4, 1, 0, 1, 32, 1)"
)
SSM_SCAN = (
    "lib.ggml_ssm_scan(c, tensor(c, F32, 16, 4, 6, 2), tensor(c, F32, 4, 6, 3, 2), tensor(c, F32, 6, 3, 2),"
    " tensor(c, F32, {n_decay}, 6), *(tensor(c, F32, 16, {n_group}, 3, 2) for _ in range(2)), tensor(c, I32, 2),"
    " {n_states})"
)
DELTA_NET = (
    "lib.ggml_gated_delta_net(c, *(tensor(c, F32, n, 2, 3, 1) for n in (16, 16, 16, 1, 1)),"
    " tensor(c, F32, {head}, {head}, 2, 1), {n_states})"
)


def _ssm_scan(
    a: Arena, t: Callable[..., Tensor], n_decay: int = 1, n_states: int = 1, n_group: int = 1
) -> tuple[Tensor, Tensor]:
    operands = {"x": t(F32, 4, 6, 3, 2), "dt": t(F32, 6, 3, 2), "a": t(F32, n_decay, 6)}
    operands |= {name: t(F32, 16, n_group, 3, 2) for name in "bc"}
    return ops.ssm_scan(a, t(F32, 16, 4, 6, 2), t(I32, 2), **operands, n_states=n_states)


def _delta_net(a: Arena, t: Callable[..., Tensor], head: int = 16, n_states: int = 1) -> tuple[Tensor, Tensor]:
    operands = {name: t(F32, 16, 2, 3, 1) for name in "qkv"} | {name: t(F32, 1, 2, 3, 1) for name in ("gate", "beta")}
    return ops.gated_delta_net(a, t(F32, head, head, 2, 1), **operands, n_states=n_states)


def _add_missing_expert(a: Arena, t: Callable[..., Tensor]) -> None:
    index = t(I32, 1, 1)
    graph = Graph(a)
    graph.expand(ops.add_id(a, t(F32, 4, 1, 1), t(F32, 4, 3), index))
    with Backend(cpu_device(), 1) as backend, Sched([backend], 64) as sched:
        sched.allocate(graph)
        index.set(np.array([3], np.int32))


BUILDING: dict[str, Guard] = {
    "sub, not a tiling": (
        "c = context(); x = lib.ggml_sub(c, tensor(c, F32, 4), tensor(c, F32, 3)); compute(c, x)",
        lambda a, t: ops.sub(a, t(F32, 4), t(F32, 3)),
    ),
    "div, not a tiling": (
        "c = context(); x = lib.ggml_div(c, tensor(c, F32, 4), tensor(c, F32, 3)); compute(c, x)",
        lambda a, t: ops.div(a, t(F32, 4), t(F32, 3)),
    ),
    "scale in place of a transposed tensor": (
        "c = context(); lib.ggml_scale_inplace(c, lib.ggml_transpose(c, tensor(c, F32, 4, 3)), 2.0)",
        lambda a, t: ops.scale_inplace(a, ops.transpose(a, t(F32, 4, 3)), 2.0),
    ),
    "fill of i32": (
        "c = context(); lib.ggml_fill(c, tensor(c, I32, 4), 2.0)",
        lambda a, t: ops.fill(a, t(I32, 4), 2.0),
    ),
    "fill in place of a transposed tensor": (
        "c = context(); lib.ggml_fill_inplace(c, lib.ggml_transpose(c, tensor(c, F32, 4, 3)), 2.0)",
        lambda a, t: ops.fill_inplace(a, ops.transpose(a, t(F32, 4, 3)), 2.0),
    ),
    "silu of a transposed tensor": (
        "c = context(); lib.ggml_silu(c, lib.ggml_transpose(c, tensor(c, F32, 4, 3)))",
        lambda a, t: ops.silu(a, ops.transpose(a, t(F32, 4, 3))),
    ),
    "geglu of two shapes": (
        "c = context(); lib.ggml_geglu_split(c, tensor(c, F32, 4), tensor(c, F32, 3))",
        lambda a, t: ops.geglu(a, t(F32, 4), t(F32, 3)),
    ),
    "swiglu_oai of two types": (
        "c = context(); lib.ggml_swiglu_oai(c, tensor(c, F32, 4), tensor(c, F16, 4), 1.0, 1.0)",
        lambda a, t: ops.swiglu_oai(a, t(F32, 4), t(F16, 4), 1.0, 1.0),
    ),
    "concat of two types": (
        "c = context(); lib.ggml_concat(c, tensor(c, F32, 4), tensor(c, F16, 4), 0)",
        lambda a, t: ops.concat(a, t(F32, 4), t(F16, 4), 0),
    ),
    "concat of other dims": (
        "c = context(); lib.ggml_concat(c, tensor(c, F32, 4), tensor(c, F32, 5), 1)",
        lambda a, t: ops.concat(a, t(F32, 4), t(F32, 5), 1),
    ),
    "concat along dim 4": (
        "c = context(); lib.ggml_concat(c, tensor(c, F32, 4), tensor(c, F32, 4), 4)",
        lambda a, t: ops.concat(a, t(F32, 4), t(F32, 4), 4),
    ),
    "repeat to no multiple": (
        "c = context(); lib.ggml_repeat_4d(c, tensor(c, F32, 4), 6, 1, 1, 1)",
        lambda a, t: ops.repeat(a, t(F32, 4), 6),
    ),
    "cpy of another count": (
        "c = context(); lib.ggml_cpy(c, tensor(c, F32, 4), tensor(c, F32, 3))",
        lambda a, t: ops.cpy(a, t(F32, 4), t(F32, 3)),
    ),
    "soft_max with alibi and no mask": (
        "c = context(); lib.ggml_soft_max_ext(c, tensor(c, F32, 8, 2), ffi.NULL, 1.0, 8.0)",
        lambda a, t: ops.soft_max(a, t(F32, 8, 2), None, 1.0, 8.0),
    ),
    "soft_max with too few sinks": (
        "c = context(); x = lib.ggml_soft_max_ext(c, tensor(c, F32, 8, 2, 4), ffi.NULL, 1.0, 0.0);"
        "lib.ggml_soft_max_add_sinks(x, tensor(c, F32, 3))",
        lambda a, t: ops.soft_max(a, t(F32, 8, 2, 4), sinks=t(F32, 3)),
    ),
    "flash_attn with sinks of f16": (
        "c = context(); x = lib.ggml_flash_attn_ext(c, tensor(c, F32, 32, 1, 2), tensor(c, F16, 32, 8, 2),"
        " tensor(c, F16, 32, 8, 2), tensor(c, F16, 8, 1), 1.0, 0.0, 0.0);"
        "lib.ggml_flash_attn_ext_add_sinks(x, tensor(c, F16, 2))",
        lambda a, t: ops.flash_attn(
            a, t(F32, 32, 1, 2), t(F16, 32, 8, 2), t(F16, 32, 8, 2), t(F16, 8, 1), scale=1.0, sinks=t(F16, 2)
        ),
    ),
    "rope with too few positions for its axes": (
        f"c = context(); {ROPE_MULTI.format(pos=3, sections=[4, 0, 0, 0])}",
        lambda a, t: ops.rope(a, t(F32, 8, 1, 3), t(I32, 3), RopeParams(8, "mrope", sections=(4, 0, 0, 0))),
    ),
    "mul_mat_id by i64": (
        "c = context(); lib.ggml_mul_mat_id(c, tensor(c, F32, 4, 3, 2), tensor(c, F32, 4, 1, 5), tensor(c, I64, 1, 5))",
        lambda a, t: ops.mul_mat_id(a, t(F32, 4, 3, 2), t(F32, 4, 1, 5), t(I64, 1, 5)),
    ),
    "mul_mat_id of other tokens": (
        "c = context(); lib.ggml_mul_mat_id(c, tensor(c, F32, 4, 3, 2), tensor(c, F32, 4, 1, 5), tensor(c, I32, 1, 4))",
        lambda a, t: ops.mul_mat_id(a, t(F32, 4, 3, 2), t(F32, 4, 1, 5), t(I32, 1, 4)),
    ),
    "mul_mat_id of transposed experts": (
        "c = context(); x = lib.ggml_transpose(c, tensor(c, F32, 4, 4, 2));"
        "lib.ggml_mul_mat_id(c, x, tensor(c, F32, 4, 1, 5), tensor(c, I32, 1, 5))",
        lambda a, t: ops.mul_mat_id(a, ops.transpose(a, t(F32, 4, 4, 2)), t(F32, 4, 1, 5), t(I32, 1, 5)),
    ),
    "add_id of another width": (
        "c = context(); lib.ggml_add_id(c, tensor(c, F32, 4, 2, 5), tensor(c, F32, 3, 6), tensor(c, I32, 2, 5))",
        lambda a, t: ops.add_id(a, t(F32, 4, 2, 5), t(F32, 3, 6), t(I32, 2, 5)),
    ),
    "ssm_conv of other channels": (
        "c = context(); lib.ggml_ssm_conv(c, tensor(c, F32, 6, 5), tensor(c, F32, 4, 4))",
        lambda a, t: ops.ssm_conv(a, t(F32, 6, 5), t(F32, 4, 4)),
    ),
    "ssm_conv of fewer columns than the kernel has": (
        "c = context(); lib.ggml_ssm_conv(c, tensor(c, F32, 2, 5), tensor(c, F32, 4, 5))",
        lambda a, t: ops.ssm_conv(a, t(F32, 2, 5), t(F32, 4, 5)),
    ),
    "ssm_scan of no states": (
        f"c = context(); {SSM_SCAN.format(n_decay=1, n_states=0, n_group=1)}",
        lambda a, t: _ssm_scan(a, t, n_states=0),
    ),
    "ssm_scan of several states of mamba": (
        f"c = context(); {SSM_SCAN.format(n_decay=16, n_states=2, n_group=1)}",
        lambda a, t: _ssm_scan(a, t, n_decay=16, n_states=2),
    ),
    "ssm_scan of another number of decays": (
        f"c = context(); {SSM_SCAN.format(n_decay=3, n_states=1, n_group=1)}",
        lambda a, t: _ssm_scan(a, t, n_decay=3),
    ),
    "rwkv_wkv7 over a state of another size": (
        "c = context(); x = [tensor(c, F32, 64, 2, 3) for _ in range(6)];"
        "lib.ggml_rwkv_wkv7(c, *x, tensor(c, F32, 64 * 64, 1))",
        lambda a, t: ops.rwkv_wkv7(a, t(F32, 64 * 64, 1), **{n: t(F32, 64, 2, 3) for n in "rwkvab"}),
    ),
    "gated_delta_net of no states": (
        f"c = context(); {DELTA_NET.format(head=16, n_states=0)}",
        lambda a, t: _delta_net(a, t, n_states=0),
    ),
    "gated_delta_net over a state of another size": (
        f"c = context(); {DELTA_NET.format(head=8, n_states=1)}",
        lambda a, t: _delta_net(a, t, head=8),
    ),
}

COMPUTING: dict[str, Guard] = {
    "clamp of i32": (
        "c = context(); compute(c, lib.ggml_clamp(c, tensor(c, I32, 4), 0.0, 1.0))",
        lambda a, t: ops.clamp(a, t(I32, 4), 0.0, 1.0),
    ),
    "norm of f16": (
        "c = context(); compute(c, lib.ggml_norm(c, tensor(c, F16, 4), 1e-5))",
        lambda a, t: ops.norm(a, t(F16, 4), 1e-5),
    ),
    "norm with a negative eps": (
        "c = context(); compute(c, lib.ggml_norm(c, tensor(c, F32, 4), -1.0))",
        lambda a, t: ops.norm(a, t(F32, 4), -1.0),
    ),
    "l2_norm with a negative eps": (
        "c = context(); compute(c, lib.ggml_l2_norm(c, tensor(c, F32, 4), -1.0))",
        lambda a, t: ops.l2_norm(a, t(F32, 4), -1.0),
    ),
    "sum_rows of a transposed tensor": (
        "c = context(); compute(c, lib.ggml_sum_rows(c, lib.ggml_transpose(c, tensor(c, F32, 4, 4))))",
        lambda a, t: ops.sum_rows(a, ops.transpose(a, t(F32, 4, 4))),
    ),
    "mean of f16": (
        "c = context(); compute(c, lib.ggml_mean(c, tensor(c, F16, 4)))",
        lambda a, t: ops.mean(a, t(F16, 4)),
    ),
    "exp of i32": (
        "c = context(); compute(c, lib.ggml_exp(c, tensor(c, I32, 4)))",
        lambda a, t: ops.exp(a, t(I32, 4)),
    ),
    "swiglu_oai of f16": (
        "c = context(); x = tensor(c, F16, 4); compute(c, lib.ggml_swiglu_oai(c, x, x, 1.0, 1.0))",
        lambda a, t: ops.swiglu_oai(a, t(F16, 4), t(F16, 4), 1.0, 1.0),
    ),
    "repeat of i64": (
        "c = context(); compute(c, lib.ggml_repeat_4d(c, tensor(c, I64, 4), 8, 1, 1, 1))",
        lambda a, t: ops.repeat(a, t(I64, 4), 8),
    ),
    "repeat of a transposed tensor": (
        "c = context(); compute(c, lib.ggml_repeat_4d(c, lib.ggml_transpose(c, tensor(c, F32, 4, 4)), 8, 4, 1, 1))",
        lambda a, t: ops.repeat(a, ops.transpose(a, t(F32, 4, 4)), 8, 4),
    ),
    "cpy of f32 into i8": (
        "c = context(); compute(c, lib.ggml_cpy(c, tensor(c, F32, 4), tensor(c, I8, 4)))",
        lambda a, t: ops.cpy(a, t(F32, 4), t(DType.I8, 4)),
    ),
    "cpy of i32 into f16": (
        "c = context(); compute(c, lib.ggml_cpy(c, tensor(c, I32, 4), tensor(c, F16, 4)))",
        lambda a, t: ops.cpy(a, t(I32, 4), t(F16, 4)),
    ),
    "cpy into some columns of q8_0": (
        "c = context(); x = tensor(c, Q8_0, 64, 4); v = lib.ggml_view_4d(c, x, 32, 4, 1, 1, 68, 272, 272, 0);"
        "compute(c, lib.ggml_cpy(c, tensor(c, F32, 32, 4), v))",
        lambda a, t: ops.cpy(a, t(F32, 32, 4), ops.view(a, t(Q8_0, 64, 4), (32, 4, 1, 1), (68, 272, 272))),
    ),
    "argsort of f16": (
        "c = context(); compute(c, lib.ggml_argsort(c, tensor(c, F16, 4), lib.GGML_SORT_ORDER_DESC))",
        lambda a, t: ops.argsort_top_k(a, t(F16, 4), 2),
    ),
    "mul_mat_id by half floats": (
        "c = context(); b = tensor(c, F16, 4, 1, 5);"
        "compute(c, lib.ggml_mul_mat_id(c, tensor(c, F32, 4, 3, 2), b, tensor(c, I32, 1, 5)))",
        lambda a, t: ops.mul_mat_id(a, t(F32, 4, 3, 2), t(F16, 4, 1, 5), t(I32, 1, 5)),
    ),
    "add_id of an expert that does not exist": (
        "c = context(); i = tensor(c, I32, 1, 1);"
        "x = lib.ggml_add_id(c, tensor(c, F32, 4, 1, 1), tensor(c, F32, 4, 3), i);"
        "compute(c, x, lambda: lib.ggml_backend_tensor_set(i, ffi.new('int32_t *', 3), 0, 4))",
        _add_missing_expert,
    ),
    "ssm_scan of groups that do not divide the heads": (
        f"c = context(); compute(c, {SSM_SCAN.format(n_decay=1, n_states=1, n_group=4)})",
        lambda a, t: _ssm_scan(a, t, n_group=4),
    ),
    "ssm_conv of a transposed tensor": (
        "c = context(); x = lib.ggml_transpose(c, tensor(c, F32, 5, 6));"
        "compute(c, lib.ggml_ssm_conv(c, x, tensor(c, F32, 4, 5)))",
        lambda a, t: ops.ssm_conv(a, ops.transpose(a, t(F32, 5, 6)), t(F32, 4, 5)),
    ),
    "rope on axes without sections": (
        f"c = context(); compute(c, {ROPE_MULTI.format(pos=12, sections=[0, 0, 0, 4])})",
        lambda a, t: ops.rope(a, t(F32, 8, 1, 3), t(I32, 12), RopeParams(8, "mrope", sections=(0, 0, 0, 4))),
    ),
    "rope on sections longer than a head": (
        f"c = context(); compute(c, {ROPE_MULTI.format(pos=12, sections=[4, 4, 4, 0])})",
        lambda a, t: ops.rope(a, t(F32, 8, 1, 3), t(I32, 12), RopeParams(8, "mrope", sections=(4, 4, 4, 0))),
    ),
}


@pytest.fixture(scope="module")
def mortal() -> Iterator[Mortal]:
    with Mortal() as process:
        yield process


@pytest.mark.parametrize("name", BUILDING | COMPUTING)
def test_the_raw_call_dies_and_pykv_raises(mortal, name):
    check_guard(mortal, (BUILDING | COMPUTING)[name])
