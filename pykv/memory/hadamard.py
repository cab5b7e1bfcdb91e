"""Hadamard rotation of quantised K and V: it spreads outliers over a block, so that quantisation loses less.

The same orthogonal map is applied to Q and K, so scores stay; the attention output is mapped back for V.
Source: spec kv_cache.md section 1.1.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from pykv.ggml import Arena, Tensor, ops
from pykv.memory.kv_plan import KVPlan
from pykv.memory.spec import MemorySpec
from pykv.typing import F32Array

MIN_BLOCK = 64


@cache
def hadamard(n: int) -> F32Array:
    """Return the orthonormal, symmetric matrix (n, n), n a power of two: H[i, j] = (-1)^popcount(i & j) / sqrt(n)."""
    assert n.bit_count() == 1, f"n={n} is no power of two"
    i = np.arange(n)
    signs = np.where(np.bitwise_count(i[:, None] & i[None, :]) % 2, -1.0, 1.0)
    matrix: F32Array = (signs / np.sqrt(n)).astype(np.float32)
    matrix.flags.writeable = False
    return matrix


def rotation_sizes(spec: MemorySpec, plan: KVPlan) -> tuple[int, int]:
    """Return the block sizes by which K and V are rotated, 0 where they are not."""
    heads_k = {spec.layers[layer.il].n_embd_head_k for layer in plan.layers}
    heads_v = {spec.layers[layer.il].n_embd_head_v for layer in plan.layers if layer.n_embd_v}
    first = spec.layers[0]  # decides even where it is not in this cache
    rot_k = rot_v = 0
    is_v_too = any(layer.n_embd_v == 0 for layer in plan.layers)
    # differs from llama.cpp: K that is read as V too is stored as it is (there too, but a shift undoes a rotation
    # that it never had)
    if plan.type_k.is_quantized and not is_v_too and _have_blocks(heads_k, first.n_embd_head_k):
        rot_k = _largest_power_of_two_in(heads_k.pop())
    if plan.type_v.is_quantized and _have_blocks(heads_v, first.n_embd_head_v):
        rot_v = MIN_BLOCK
    return rot_k, rot_v


def rotate(arena: Arena, x: Tensor, matrix: Tensor) -> Tensor:
    """Return `x` with each block of its first dim multiplied by `matrix` [n, n]."""
    n = matrix.ne[0]
    if not x.is_contiguous:
        x = ops.cont(arena, x)
    blocks = ops.reshape(arena, x, n, x.n_elements // n)
    return ops.reshape(arena, ops.mul_mat(arena, matrix, blocks, is_hadamard=True), *x.ne)


def _have_blocks(heads: set[int], first: int) -> bool:
    # differs from llama.cpp: the cache's own heads must consist of whole blocks too, because one that reached
    # into the next head could not be undone
    return len(heads) == 1 and first % MIN_BLOCK == 0 and min(heads) % MIN_BLOCK == 0


def _largest_power_of_two_in(n: int) -> int:
    return n & -n
