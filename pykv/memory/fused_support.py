"""Whether pykv's attention kernel covers a layer, and why not."""

from __future__ import annotations

from pykv.ggml import Arena, DType, ops
from pykv.memory.spec import LayerSpec


def fused_misfit(n_head: int, layer: LayerSpec, type_k: DType, type_v: DType) -> str | None:
    """Return what about a layer of `n_head` query heads is not covered, None if all is."""
    for dtype, head in ((type_k, layer.n_embd_head_k), (type_v, layer.n_embd_head_v)):
        if head % dtype.block_size:
            return f"heads of {head} in blocks of {dtype.block_size}"
    arena = Arena(4)
    q = arena.tensor(DType.F32, (layer.n_embd_head_k, n_head))
    k = arena.tensor(type_k, (layer.n_embd_head_k, layer.n_head_kv))
    v = arena.tensor(type_v, (layer.n_embd_head_v, layer.n_head_kv))
    return ops.fused_attn_misfit(q, k, v, arena.tensor(DType.F16, (1, 1)))
