"""Attention over stored K and V: the one place where its graph is built.

Three paths compute the same. `fused` is pykv's kernel, on the CPU. `flash` is ggml's operation.
`matmul` multiplies matrices, with the query heads of one KV head laid side by side as rows, so that each K and V row is
read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pykv.errors import ParamError
from pykv.ggml import Arena, DType, Tensor, ops


class AttentionPath(Enum):
    """How attention is computed."""

    FUSED = "fused"
    FLASH = "flash"
    GROUPED = "matmul"

    @property
    def mask_dtype(self) -> DType:
        return DType.F32 if self is AttentionPath.GROUPED else DType.F16


MANY_TOKENS = 64
"""From this many tokens on a ubatch counts as a prompt; ggml's flash attention works in tiles of as many."""


@dataclass(frozen=True)
class AttentionPlan:
    """Which path serves which ubatch, and how V is laid out for it.

    Generation takes `few` over V in rows and `GROUPED` over transposed V, since that is what each reads best.

    Attributes
    ----------
    many : path of ubatches of `MANY_TOKENS` tokens a stream or more: prompts; `FLASH` or `GROUPED`.
    transpose_from : used cells from which V is stored transposed; 0 = always, None = never.
    few : path of fewer tokens over V in rows, `FUSED` or `FLASH`.
    fuse_from : cells of a graph from which prompts take `FUSED` instead of `many`; 0 = always, None = never.

    Raises
    ------
    ParamError : a path that does not serve such ubatches.
    """

    many: AttentionPath
    transpose_from: int | None
    few: AttentionPath = AttentionPath.FLASH
    fuse_from: int | None = None

    def __post_init__(self) -> None:
        if self.many is AttentionPath.FUSED or self.few is AttentionPath.GROUPED:
            raise ParamError(f"few={self.few.value} must be fused or flash, many={self.many.value} flash or matmul")

    @classmethod
    def of(cls, path: AttentionPath) -> AttentionPlan:
        """Return the plan that takes one path wherever that serves."""
        if path is AttentionPath.FUSED:
            return cls(AttentionPath.FLASH, None, path, 0)
        return cls(path, 0 if path is AttentionPath.GROUPED else None)

    def path(self, n_tokens: int, v_trans: bool, n_kv: int) -> AttentionPath:
        """Return the path for that many tokens in each stream, over `n_kv` cells and V as it is stored."""
        if n_tokens >= MANY_TOKENS:
            return AttentionPath.FUSED if self.fuses(n_kv) else self.many
        return AttentionPath.GROUPED if v_trans else self.few

    def fuses(self, n_kv: int) -> bool:
        """Return whether prompts over `n_kv` cells take the fused path."""
        return self.fuse_from is not None and n_kv >= self.fuse_from

    @property
    def names(self) -> tuple[str, ...]:
        """The paths that it may take, each once: over V in rows, or transposed from the start."""
        first = AttentionPath.GROUPED if self.transpose_from == 0 else self.few
        late = () if self.fuse_from is None else (AttentionPath.FUSED,)
        paths = (first, *late) if self.fuse_from == 0 else (first, self.many, *late)
        return tuple(dict.fromkeys(path.value for path in paths))

    def wants_transposed(self, n_used: int, v_trans: bool) -> bool:
        """Return how V shall lie with `n_used` cells in use, given how it lies.

        It goes back only at half the depth at which it went, so that a cache near that depth does not swing.
        """
        if self.transpose_from is None:
            return False
        return n_used >= (self.transpose_from // 2 if v_trans else self.transpose_from)


@dataclass(frozen=True)
class AttentionParams:
    """Scores are softmax(softcap(q·k · scale) + mask · slope).

    `sinks` [H] f32 are scores of one more cell, without content, for each head; None = there is none.
    """

    scale: float
    alibi_max_bias: float = 0.0
    logit_softcap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True)
class KVView:
    """Stored keys and values of one layer, as a graph reads them.

    Attributes
    ----------
    k : [Dk, Hk, n_kv, S].
    v : [Dv, Hk, n_kv, S], or [n_kv, Hk, Dv, S] if `v_trans`.
    """

    k: Tensor
    v: Tensor
    v_trans: bool


def attend(arena: Arena, path: AttentionPath, q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams) -> Tensor:
    """Return attention outputs `[Dv, H, n_tokens]`.

    Parameters
    ----------
    q : [Dk, H, n_tokens], tokens of stream 0 first.
    mask : [n_kv, n_tokens/S, 1, S], of `path.mask_dtype`.
    """
    n_stream = kv.k.ne[3]
    q = ops.reshape(arena, q, q.ne[0], q.ne[1], q.ne[2] // n_stream, n_stream)
    return _CORES[path](arena, q, kv, mask, params)


def _fused(arena: Arena, q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams) -> Tensor:
    out = ops.fused_attn(
        arena,
        q,
        kv.k,
        v_in_rows(arena, kv),
        mask,
        sinks=params.sinks,
        scale=params.scale,
        max_bias=params.alibi_max_bias,
        logit_softcap=params.logit_softcap,
    )
    return ops.reshape(arena, out, out.ne[0], out.ne[1], out.ne[2] * out.ne[3])


def v_in_rows(arena: Arena, kv: KVView) -> Tensor:
    """Return V as [Dv, Hk, n_kv, S], copied if it is not stored so."""
    return ops.cont(arena, ops.permute(arena, kv.v, 2, 1, 0, 3)) if kv.v_trans else kv.v


def _flash(arena: Arena, q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams) -> Tensor:
    head_v, n_head, n_tokens = _head_v(kv), q.ne[1], q.ne[2] * q.ne[3]
    k = _plain(arena, ops.permute(arena, kv.k, 0, 2, 1, 3))  # [Dk, n_kv, Hk, S]
    if kv.v_trans:
        v = ops.cont(arena, ops.permute(arena, kv.v, 1, 2, 0, 3))
    else:
        v = ops.permute(arena, kv.v, 0, 2, 1, 3)
    out = ops.flash_attn(
        arena,
        ops.permute(arena, q, 0, 2, 1, 3),  # [Dk, n, H, S]
        k,
        _plain(arena, v),  # [Dv, n_kv, Hk, S]
        mask,
        sinks=params.sinks,
        scale=params.scale,
        max_bias=params.alibi_max_bias,
        logit_softcap=params.logit_softcap,
    )
    return ops.reshape(arena, out, head_v, n_head, n_tokens)


def _grouped(arena: Arena, q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams) -> Tensor:
    return grouped(arena, q, kv, mask, params)[0]


def grouped(arena: Arena, q: Tensor, kv: KVView, mask: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Return what `GROUPED` computes of `q` [Dk, H, n, S]: outputs [Dv, H, n * S], and the weights behind them."""
    _, n_head, n, n_stream = q.ne
    head_v, n_head_kv, n_kv = _head_v(kv), kv.k.ne[1], kv.k.ne[2]
    weights = attention_weights(arena, q, kv.k, mask, params)
    rows = ops.reshape(arena, weights, n_kv, n * (n_head // n_head_kv), n_head_kv, n_stream)
    out = ops.mul_mat(arena, _v_by_channel(arena, kv), rows, f32_accumulate=True)  # [Dv, n_rows, Hk, S]
    out = ops.reshape(arena, out, head_v, n, n_head, n_stream)
    if n > 1:
        out = ops.cont(arena, ops.permute(arena, out, 0, 2, 1, 3))
    return ops.reshape(arena, out, head_v, n_head, n * n_stream), weights


def attention_weights(arena: Arena, q: Tensor, k: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Return how much of each cell each query takes, [n_kv, n, H, S]: of each query, 1 in all.

    Parameters
    ----------
    q : [Dk, H, n, S], contiguous.
    k : [Dk, Hk, n_kv, S].
    mask : [n_kv, n, 1, S], f16 or f32.
    """
    head_k, n_head, n, n_stream = q.ne
    n_head_kv, n_kv = k.ne[1], k.ne[2]
    if n > 1:
        q = ops.cont(arena, ops.permute(arena, q, 0, 2, 1, 3))
    q = ops.reshape(arena, q, head_k, n * (n_head // n_head_kv), n_head_kv, n_stream)
    k = ops.permute(arena, k, 0, 2, 1, 3)
    scores = ops.mul_mat(arena, k, q, f32_accumulate=True)  # [n_kv, n_rows, Hk, S]
    scores = ops.reshape(arena, scores, n_kv, n, n_head, n_stream)
    scale = params.scale
    if params.logit_softcap:
        capped = ops.tanh(arena, ops.scale(arena, scores, scale / params.logit_softcap))
        scores, scale = ops.scale(arena, capped, params.logit_softcap), 1.0
    return ops.soft_max(arena, scores, mask, scale, params.alibi_max_bias, sinks=params.sinks)


def _v_by_channel(arena: Arena, kv: KVView) -> Tensor:
    """Return V as [n_kv, Dv, Hk, S], copied if it is not stored so."""
    if kv.v_trans:
        return ops.permute(arena, kv.v, 0, 2, 1, 3)
    if kv.v.dtype.is_quantized:
        raise ParamError(f"type_v={kv.v.dtype.label!r} needs flash attention: blocks cannot be transposed")
    return ops.cont(arena, ops.permute(arena, kv.v, 1, 2, 0, 3))


def _plain(arena: Arena, x: Tensor) -> Tensor:
    """Return what the fused operation reads: it has no kernel for f32."""
    return ops.cast(arena, x, DType.F16) if x.dtype == DType.F32 else x


def _head_v(kv: KVView) -> int:
    return kv.v.ne[2] if kv.v_trans else kv.v.ne[0]


_CORES = {AttentionPath.FUSED: _fused, AttentionPath.FLASH: _flash, AttentionPath.GROUPED: _grouped}
