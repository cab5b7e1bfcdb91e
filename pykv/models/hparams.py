"""Hyperparameters of a model, read and checked from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pykv.errors import GGUFError
from pykv.gguf import GGUFFile, Metadata

ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

MAX_STRETCH = 2.0**31
"""Positions lie below it, so a factor beyond it, or beyond its inverse, leaves nothing of them."""

FLOAT32_MAX, FLOAT32_MIN = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_normal)
"""The largest number and the smallest normal one of the type that ggml computes with."""

_T = TypeVar("_T", int, float)


@dataclass(frozen=True)
class RopeScaling:
    """How the model stretches positions beyond the context it was trained at.

    Attributes
    ----------
    kind : "none", "linear", "yarn" or "longrope".
    freq_scale : factor on positions, 1/scaling factor.
    n_ctx_orig : context length of the first training; 0 = as trained.
    attn_factor : factor on rotated vectors, whatever the kind.
    yarn_attn_factor, ext_factor, beta_fast, beta_slow, log_multiplier : YaRN; an `ext_factor` below 0 means "by kind".
    """

    kind: str = "linear"
    freq_scale: float = 1.0
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    yarn_attn_factor: float = 1.0
    ext_factor: float = -1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0


@dataclass(frozen=True)
class HParams:
    """Sizes of a decoder.

    Attributes
    ----------
    architecture : as the file names it.
    n_head, n_head_kv : per layer.
    n_embd_head_k, n_embd_head_v : elements of one head.
    n_rot : elements of a head that are rotated.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_head_by_layer: tuple[int, ...]
    n_head_kv_by_layer: tuple[int, ...]
    n_ff_by_layer: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int
    norm_rms_eps: float
    rope_freq_base: float
    rope_scaling: RopeScaling
    attention_scale: float

    @property
    def n_head(self) -> int:
        """Query heads of the widest layer."""
        return max(self.n_head_by_layer)

    @property
    def n_head_kv(self) -> int:
        """K and V heads of the widest layer."""
        return max(self.n_head_kv_by_layer)

    @property
    def kq_scale(self) -> float:
        """Factor on scores."""
        return self.attention_scale or float(self.n_embd_head_k) ** -0.5

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> HParams:
        """Read and check the hyperparameters.

        Raises
        ------
        GGUFError : a key is missing, of the wrong type, or out of range; the message names it.
        """
        return _read(_Keys(file))


class _Keys:
    """Typed reading of the keys below ``<architecture>.``, with range checks."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.meta: Metadata = file.metadata
        self.architecture = self.meta.typed("general.architecture", str)
        self.tensors = file.tensors

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def number(self, name: str, kind: type[_T], default: _T | None = None) -> _T:
        if default is None:
            return self.meta.typed(self.key(name), kind)
        return self.meta.typed(self.key(name), kind, default)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.number(name, int, default)
        if not least <= value < 2**31:
            raise self.refusal(name, value, f"at least {least} and at most {2**31 - 1}")
        return value

    def finite(self, name: str, default: float) -> float:
        value = self.number(name, float, default)
        if not abs(value) <= FLOAT32_MAX:  # false for a NaN too
            raise self.refusal(name, value, "a finite number in float32")
        return value

    def unsigned(self, name: str, default: float) -> float:
        value = self.finite(name, default)
        if value < 0:
            raise self.refusal(name, value, "a number, not negative")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a number above 0, or 0 where that is the default and means "not given"."""
        value = self.number(name, float, default)
        if not (FLOAT32_MIN <= value <= FLOAT32_MAX or value == default == 0.0):
            raise self.refusal(name, value, "a positive number, neither tiny nor infinite in float32")
        return value

    def stretch(self, name: str) -> float:
        """Return a factor on positions, or 0 for "not given"."""
        value = self.positive(name, 0.0)
        if value and not 1 / MAX_STRETCH <= value <= MAX_STRETCH:
            raise self.refusal(name, value, "a positive number in 2^-31..2^31")
        return value

    def refusal(self, name: str, value: object, limits: str) -> GGUFError:
        return GGUFError(f"{self.path}: {self.key(name)}={value} must be {limits}")

    def per_layer(self, name: str, n_layer: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return one number per layer; the file may give one for all."""
        key = self.key(name)
        if key not in self.meta and default is not None:
            return default
        value = self.meta[key] if key in self.meta else self.size(name)
        values = value.tolist() if isinstance(value, np.ndarray) else [self.size(name)] * n_layer
        if len(values) != n_layer or not all(isinstance(v, int) and v >= 0 for v in values):
            raise GGUFError(f"{self.path}: {key} must hold one count for each of the {n_layer} layers")
        return tuple(values)


def _read(keys: _Keys) -> HParams:
    n_layer, n_embd = keys.size("block_count"), keys.size("embedding_length")
    if n_layer > len(keys.tensors):
        raise GGUFError(
            f"{keys.path}: {keys.key('block_count')}={n_layer} layers cannot be made of {len(keys.tensors)} tensors"
        )
    n_head = keys.per_layer("attention.head_count", n_layer)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, n_head)
    for il, (q, kv) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if q < 1 or kv < 1 or q % kv:
            raise GGUFError(f"{keys.path}: layer {il}: {kv} KV heads cannot serve {q} query heads")
    head = n_embd // n_head[0]
    head_k = keys.size("attention.key_length", head)
    n_rot = keys.size("rope.dimension_count", head_k)
    if n_rot > head_k or n_rot % 2:
        raise GGUFError(f"{keys.path}: {keys.key('rope.dimension_count')}={n_rot} must be even and at most {head_k}")
    _refuse_other_kinds(keys)
    return HParams(
        architecture=keys.architecture,
        n_layer=n_layer,
        n_embd=n_embd,
        n_vocab=_n_vocab(keys),
        n_ctx_train=keys.size("context_length"),
        n_head_by_layer=n_head,
        n_head_kv_by_layer=n_head_kv,
        n_ff_by_layer=keys.per_layer("feed_forward_length", n_layer),
        n_embd_head_k=head_k,
        n_embd_head_v=keys.size("attention.value_length", head),
        n_rot=n_rot,
        norm_rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope_freq_base=_freq_base(keys),
        rope_scaling=_rope_scaling(keys),
        attention_scale=keys.positive("attention.scale", 0.0),
    )


def _refuse_other_kinds(keys: _Keys) -> None:
    """Refuse models that would be computed as something that they are not."""
    if keys.size("expert_count", 0, least=0):
        raise GGUFError(f"{keys.path}: {keys.key('expert_count')}: mixtures of experts are not supported")
    if not keys.meta.typed(keys.key("attention.causal"), bool, True):
        causal = keys.key("attention.causal")
        raise GGUFError(f"{keys.path}: {causal}=False: attention to later tokens is not supported")
    pooling = keys.number("pooling_type", int, 0)
    if pooling:
        raise GGUFError(
            f"{keys.path}: {keys.key('pooling_type')}={pooling}: pooled embeddings are not supported; accepted: 0"
        )


def _freq_base(keys: _Keys) -> float:
    """Return the base; below 1, frequencies would grow from one pair of dims to the next until they overflow."""
    base = keys.positive("rope.freq_base", 10000.0)
    if base < 1:
        raise keys.refusal("rope.freq_base", base, "at least 1")
    return base


def _n_vocab(keys: _Keys) -> int:
    """Return the rows of the embedding: the vocabulary list may be absent or padded."""
    table = keys.tensors.get("token_embd.weight")
    if table is None:
        raise GGUFError(f"{keys.path}: the tensor 'token_embd.weight' is missing")
    return table.ne[1]


def _rope_scaling(keys: _Keys) -> RopeScaling:
    kind = keys.meta.typed(keys.key("rope.scaling.type"), str, "linear")
    if kind not in ROPE_SCALINGS:
        raise GGUFError(f"{keys.path}: {keys.key('rope.scaling.type')}={kind!r} is unknown")
    factor = keys.stretch("rope.scaling.factor") or keys.stretch("rope.scale_linear")
    return RopeScaling(
        kind=kind,
        freq_scale=1.0 / factor if factor else 1.0,
        n_ctx_orig=keys.size("rope.scaling.original_context_length", 0, least=0),
        attn_factor=keys.finite("rope.scaling.attn_factor", 1.0),
        yarn_attn_factor=keys.finite("rope.scaling.yarn_attn_factor", 1.0),
        ext_factor=keys.finite("rope.scaling.yarn_ext_factor", -1.0),
        beta_fast=keys.unsigned("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.unsigned("rope.scaling.yarn_beta_slow", 1.0),
        log_multiplier=keys.finite("rope.scaling.yarn_log_multiplier", 0.0),
    )
