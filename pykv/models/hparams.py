"""Hyperparameters of a model, read and checked from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.errors import GGUFError
from pykv.gguf import GGUFFile
from pykv.models.keys import Keys

ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


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
    n_head, n_head_kv : per layer; 0 K and V heads where a layer does not attend.
    norm_rms_eps : what norms add to the variance.
    n_embd_head_k, n_embd_head_v : elements of one head.
    n_rot : elements of a head that are rotated.
    n_expert_used : experts that each token meets in a layer, 0 where there are none.
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
    n_expert_used: int = 0

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
        return _read(Keys(file))


def refuse_experts(keys: Keys) -> None:
    """Raise `GGUFError` if a model mixes experts where its family has none here."""
    if keys.size("expert_count", 0, least=0):
        raise GGUFError(f"{keys.path}: {keys.key('expert_count')}: mixtures of experts are not supported here")


def refuse_drafting_layers(keys: Keys) -> None:
    """Raise `GGUFError` if a model has layers behind the last one that predict further tokens."""
    if keys.size("nextn_predict_layers", 0, least=0):
        raise GGUFError(f"{keys.path}: {keys.key('nextn_predict_layers')}: such layers are not supported here")


def refuse_headless_layers(keys: Keys, hparams: HParams) -> None:
    """Raise `GGUFError` if a layer has no heads where every layer of the family attends."""
    for il, (q, kv) in enumerate(zip(hparams.n_head_by_layer, hparams.n_head_kv_by_layer, strict=True)):
        if q < 1 or kv < 1:
            raise GGUFError(f"{keys.path}: layer {il}: {kv} KV heads cannot serve {q} query heads")


def refuse_tensors(keys: Keys, *names: str) -> None:
    """Raise `GGUFError` if the file has tensors that nobody would read; `names` are of the model, or of any layer."""
    for tensor in keys.tensors:
        if tensor in names or (tensor.startswith("blk.") and tensor.split(".", 2)[-1] in names):
            raise GGUFError(f"{keys.path}: the tensor {tensor!r} is of a variant that is not supported here")


def _read(keys: Keys) -> HParams:
    n_layer, n_embd = keys.size("block_count"), keys.size("embedding_length")
    if n_layer > len(keys.tensors):
        raise GGUFError(
            f"{keys.path}: {keys.key('block_count')}={n_layer} layers cannot be made of {len(keys.tensors)} tensors"
        )
    n_head = keys.per_layer("attention.head_count", n_layer)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, n_head)
    for il, (q, kv) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if kv and (q < 1 or q % kv):
            raise GGUFError(f"{keys.path}: layer {il}: {kv} KV heads cannot serve {q} query heads")
    head = n_embd // next((n for n in n_head if n), 1)
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
        norm_rms_eps=_eps(keys),
        rope_freq_base=_freq_base(keys),
        rope_scaling=_rope_scaling(keys),
        attention_scale=keys.positive("attention.scale", 0.0),
        n_expert_used=_n_expert_used(keys),
    )


def _refuse_other_kinds(keys: Keys) -> None:
    """Refuse models that would be computed as something that they are not."""
    if not keys.meta.typed(keys.key("attention.causal"), bool, True):
        causal = keys.key("attention.causal")
        raise GGUFError(f"{keys.path}: {causal}=False: attention to later tokens is not supported")
    pooling = keys.number("pooling_type", int, 0)
    if pooling:
        raise GGUFError(
            f"{keys.path}: {keys.key('pooling_type')}={pooling}: pooled embeddings are not supported; accepted: 0"
        )


def _n_expert_used(keys: Keys) -> int:
    n_used, n_expert = (keys.size(f"expert_{name}", 0, least=0) for name in ("used_count", "count"))
    if n_used > n_expert:
        raise keys.refusal("expert_used_count", n_used, f"at most the {n_expert} experts")
    return n_used


def _eps(keys: Keys) -> float:
    """Return what norms add to the variance: RMS norm's, or layer norm's where a model has that instead."""
    name = "attention.layer_norm_epsilon"
    return keys.positive(name if keys.key(name) in keys.meta else "attention.layer_norm_rms_epsilon")


def _freq_base(keys: Keys) -> float:
    """Return the base; below 1, frequencies would grow from one pair of dims to the next until they overflow."""
    base = keys.positive("rope.freq_base", 10000.0)
    if base < 1:
        raise keys.refusal("rope.freq_base", base, "at least 1")
    return base


def _n_vocab(keys: Keys) -> int:
    """Return the rows of the embedding: the vocabulary list may be absent or padded."""
    table = keys.tensors.get("token_embd.weight")
    if table is None:
        raise GGUFError(f"{keys.path}: the tensor 'token_embd.weight' is missing")
    return table.ne[1]


def _rope_scaling(keys: Keys) -> RopeScaling:
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
