"""Graph operations: each checks its operands, then makes one C call. Nothing is computed here."""

from pykv.ggml.ops.arithmetic import add, column_max, mul, rms_norm, scale, swiglu, tanh
from pykv.ggml.ops.attention import RopeParams, flash_attn, rope, soft_max
from pykv.ggml.ops.fused import (
    FUSED_MAX_ROWS,
    MassOf,
    fused_attn,
    fused_attn_masses,
    fused_attn_misfit,
    fused_isa,
)
from pykv.ggml.ops.matmul import mul_mat, out_prod
from pykv.ggml.ops.rows import get_rows, set_rows
from pykv.ggml.ops.shape import cast, cont, pad, permute, reshape, transpose, view

__all__ = [
    "FUSED_MAX_ROWS",
    "MassOf",
    "RopeParams",
    "add",
    "cast",
    "column_max",
    "cont",
    "flash_attn",
    "fused_attn",
    "fused_attn_masses",
    "fused_attn_misfit",
    "fused_isa",
    "get_rows",
    "mul",
    "mul_mat",
    "out_prod",
    "pad",
    "permute",
    "reshape",
    "rms_norm",
    "rope",
    "scale",
    "set_rows",
    "soft_max",
    "swiglu",
    "tanh",
    "transpose",
    "view",
]
