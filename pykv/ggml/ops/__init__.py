"""Graph operations: each checks its operands, then makes one C call. Nothing is computed here."""

from pykv.ggml.ops.arithmetic import add, clamp, div, fill, fill_inplace, mul, scale, scale_inplace, sub
from pykv.ggml.ops.attention import flash_attn, soft_max
from pykv.ggml.ops.experts import add_id, argsort_top_k, mul_mat_id
from pykv.ggml.ops.fused import (
    FUSED_MAX_ROWS,
    MassOf,
    fused_attn,
    fused_attn_masses,
    fused_attn_misfit,
    fused_isa,
)
from pykv.ggml.ops.gated import geglu, swiglu, swiglu_oai
from pykv.ggml.ops.matmul import mul_mat, out_prod
from pykv.ggml.ops.norms import l2_norm, norm, rms_norm
from pykv.ggml.ops.reduction import column_max, mean, sum_rows
from pykv.ggml.ops.rope import RopeParams, rope
from pykv.ggml.ops.rows import get_rows, set_rows
from pykv.ggml.ops.scan import WKV_LANES, gated_delta_net, rwkv_wkv7, ssm_conv, ssm_scan
from pykv.ggml.ops.shape import cast, concat, cont, cpy, join, pad, permute, repeat, reshape, transpose, view
from pykv.ggml.ops.unary import exp, gelu, neg, relu, sigmoid, silu, softplus, sqr, sqrt, tanh

__all__ = [
    "FUSED_MAX_ROWS",
    "WKV_LANES",
    "MassOf",
    "RopeParams",
    "add",
    "add_id",
    "argsort_top_k",
    "cast",
    "clamp",
    "column_max",
    "concat",
    "cont",
    "cpy",
    "div",
    "exp",
    "fill",
    "fill_inplace",
    "flash_attn",
    "fused_attn",
    "fused_attn_masses",
    "fused_attn_misfit",
    "fused_isa",
    "gated_delta_net",
    "geglu",
    "gelu",
    "get_rows",
    "join",
    "l2_norm",
    "mean",
    "mul",
    "mul_mat",
    "mul_mat_id",
    "neg",
    "norm",
    "out_prod",
    "pad",
    "permute",
    "relu",
    "repeat",
    "reshape",
    "rms_norm",
    "rope",
    "rwkv_wkv7",
    "scale",
    "scale_inplace",
    "set_rows",
    "sigmoid",
    "silu",
    "soft_max",
    "softplus",
    "sqr",
    "sqrt",
    "ssm_conv",
    "ssm_scan",
    "sub",
    "sum_rows",
    "swiglu",
    "swiglu_oai",
    "tanh",
    "transpose",
    "view",
]
