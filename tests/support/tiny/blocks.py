"""Tensors that several architectures have in a layer: names without `blk.N.`, shapes in numpy order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from support.tiny.model import Shapes


class AttentionSizes(Protocol):
    """The sizes that attention and the ends of a model need."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_head_kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def ends(model: AttentionSizes, *, is_tied: bool = True, has_bias: bool = False) -> Shapes:
    """Return the embedding, the last norm and, unless it is the embedding again, the output matrix."""
    shapes: Shapes = {"token_embd.weight": (model.n_vocab, model.n_embd), "output_norm.weight": (model.n_embd,)}
    if has_bias:
        shapes["output_norm.bias"] = (model.n_embd,)
    if not is_tied:
        shapes["output.weight"] = (model.n_vocab, model.n_embd)
    return shapes


def layers(blocks: Iterable[Shapes]) -> Shapes:
    """Return the tensors of consecutive layers under their full names."""
    return {f"blk.{il}.{name}": shape for il, block in enumerate(blocks) for name, shape in block.items()}


def norms(n_embd: int, *names: str, has_bias: bool = False) -> Shapes:
    """Return norms over the residual stream."""
    kinds = ("weight", "bias") if has_bias else ("weight",)
    return {f"{name}.{kind}": (n_embd,) for name in names for kind in kinds}


def attention(model: AttentionSizes) -> Shapes:
    """Return the four projections."""
    q, kv = model.n_head * model.head_dim, model.n_head_kv * model.head_dim
    return {
        "attn_q.weight": (q, model.n_embd),
        "attn_k.weight": (kv, model.n_embd),
        "attn_v.weight": (kv, model.n_embd),
        "attn_output.weight": (model.n_embd, q),
    }


def qk_norms(model: AttentionSizes) -> Shapes:
    """Return the norms of one head's query and key."""
    return {"attn_q_norm.weight": (model.head_dim,), "attn_k_norm.weight": (model.head_dim,)}


def qkv_biases(model: AttentionSizes) -> Shapes:
    """Return what is added to queries, keys and values."""
    q, kv = model.n_head * model.head_dim, model.n_head_kv * model.head_dim
    return {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}


def fused_attention(n_embd: int, *, has_bias: bool) -> Shapes:
    """Return the projections with q, k and v below one another in one matrix, as many KV heads as heads."""
    shapes: Shapes = {"attn_qkv.weight": (3 * n_embd, n_embd), "attn_output.weight": (n_embd, n_embd)}
    if has_bias:
        shapes |= {"attn_qkv.bias": (3 * n_embd,), "attn_output.bias": (n_embd,)}
    return shapes


def gated_ffn(n_embd: int, n_ff: int, suffix: str = "") -> Shapes:
    """Return gate, up and down; `suffix` is "_shexp" for an expert that every token meets."""
    wide, narrow = (n_ff, n_embd), (n_embd, n_ff)
    return {
        f"ffn_gate{suffix}.weight": wide,
        f"ffn_up{suffix}.weight": wide,
        f"ffn_down{suffix}.weight": narrow,
    }


def plain_ffn(n_embd: int, n_ff: int, *, has_bias: bool) -> Shapes:
    """Return up and down without a gate."""
    shapes: Shapes = {"ffn_up.weight": (n_ff, n_embd), "ffn_down.weight": (n_embd, n_ff)}
    if has_bias:
        shapes |= {"ffn_up.bias": (n_ff,), "ffn_down.bias": (n_embd,)}
    return shapes


def experts(n_embd: int, n_ff: int, n_expert: int) -> Shapes:
    """Return the router and the experts' matrices, one below another."""
    return {
        "ffn_gate_inp.weight": (n_expert, n_embd),
        "ffn_gate_exps.weight": (n_expert, n_ff, n_embd),
        "ffn_up_exps.weight": (n_expert, n_ff, n_embd),
        "ffn_down_exps.weight": (n_expert, n_embd, n_ff),
    }


def scan_per_channel(n_embd: int, d_conv: int, d_state: int, dt_rank: int) -> Shapes:
    """Return Mamba's mixer, whose width is twice the embedding's."""
    width = 2 * n_embd
    return {
        "ssm_in.weight": (2 * width, n_embd),
        "ssm_conv1d.weight": (width, d_conv),
        "ssm_conv1d.bias": (width,),
        "ssm_x.weight": (dt_rank + 2 * d_state, width),
        "ssm_dt.weight": (width, dt_rank),
        "ssm_dt.bias": (width,),
        "ssm_a": (width, d_state),
        "ssm_d": (width,),
        "ssm_out.weight": (n_embd, width),
    }


class ScanSizes(Protocol):
    """The sizes of Mamba 2's mixer."""

    @property
    def n_embd(self) -> int: ...
    @property
    def d_conv(self) -> int: ...
    @property
    def d_state(self) -> int: ...
    @property
    def d_inner(self) -> int: ...
    @property
    def n_scan_head(self) -> int: ...
    @property
    def n_group(self) -> int: ...


def scan_per_head(model: ScanSizes, *, has_norm: bool) -> Shapes:
    """Return Mamba 2's mixer."""
    n_conv = model.d_inner + 2 * model.n_group * model.d_state
    shapes: Shapes = {
        "ssm_in.weight": (model.d_inner + n_conv + model.n_scan_head, model.n_embd),
        "ssm_conv1d.weight": (n_conv, model.d_conv),
        "ssm_conv1d.bias": (n_conv,),
        "ssm_dt.bias": (model.n_scan_head,),
        "ssm_a": (model.n_scan_head, 1),
        "ssm_d": (model.n_scan_head, 1),
        "ssm_out.weight": (model.n_embd, model.d_inner),
    }
    if has_norm:
        shapes["ssm_norm.weight"] = (model.n_group, model.d_inner // model.n_group)
    return shapes
