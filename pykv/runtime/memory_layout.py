"""How a context lays out its memory: where each layer goes, in what types, and for which kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pykv.ggml import BufferType, cpu_device
from pykv.memory import AttentionPath, AttentionPlan, KVCache, KVPlan, KVSettings
from pykv.memory.attention_probe import ProbeShape, faster_plan
from pykv.runtime.params import ContextParams, ResolvedParams, resolve

if TYPE_CHECKING:
    from pykv.runtime.model import Model


def kv_plan(model: Model, params: ContextParams) -> KVPlan:
    """Return what the KV cache of a context takes, without allocating it."""
    resolved = resolve(params, model.hparams)
    spec = model.architecture.memory_spec(resolved.rope)
    # rows of equal width take the same bytes in both layouts: no need to measure which one it will be
    is_even = len({layer.n_embd_v for layer in spec.layers}) == 1
    if is_even and resolved.flash_attn == "auto":
        attention = AttentionPlan.of(AttentionPath.FLASH)
    else:
        attention = attention_plan(model, resolved)
    return KVCache.plan(spec, kv_settings(resolved, attention), place=kv_places(model, resolved))


def kv_places(model: Model, params: ResolvedParams) -> Callable[[int], BufferType]:
    """Return where each layer's K and V go: beside the layer's weights."""

    def place(il: int) -> BufferType:
        device = model.placement.layers[il] if params.offload_kqv else cpu_device()
        return device.buffer_type

    return place


def kv_settings(params: ResolvedParams, attention: AttentionPlan) -> KVSettings:
    """Return sizes, types and layout."""
    return KVSettings(
        n_cells=params.n_ctx_seq,
        n_seq_max=params.n_seq_max,
        unified=params.kv_unified,
        type_k=params.type_k,
        type_v=params.type_v,
        v_trans=attention.transpose_from == 0,
        reference_moves=params.reference_moves,
    )


def attention_plan(model: Model, params: ResolvedParams) -> AttentionPlan:
    """Return how attention is computed, as asked for or as measured."""
    if params.flash_attn != "auto":
        return AttentionPlan.of(AttentionPath.FLASH if params.flash_attn else AttentionPath.GROUPED)
    # differs from llama.cpp: "auto" is decided by measuring, where there it means "wherever it can run", because the
    # fused kernel is the slower one on many CPUs; V follows, so its layout is no property of the parameters
    hp = model.hparams
    shape = ProbeShape(
        n_head=hp.n_head_by_layer[0],
        n_head_kv=hp.n_head_kv_by_layer[0],
        n_embd_head_k=hp.n_embd_head_k,
        n_embd_head_v=hp.n_embd_head_v,
        n_cells=params.n_ctx_seq,
        type_k=params.type_k,
        type_v=params.type_v,
    )
    return faster_plan(model.placement.layers[0], params.n_threads, shape)
