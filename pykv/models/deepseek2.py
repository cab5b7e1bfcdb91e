"""DeepSeek 2 and 3: llama whose heads share one short K per token, read as V too; experts behind the first layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pykv.ggml import RopeParams, Tensor
from pykv.memory import MemorySpec
from pykv.models.architecture import Architecture
from pykv.models.blocks import GatedFFN, silu_ffn, take_embeddings, take_output
from pykv.models.experts import GATINGS, Experts, Routing, mix_experts
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams, refuse_headless_layers
from pykv.models.keys import Keys
from pykv.models.latent_attention import LatentAttention, LatentSizes
from pykv.models.rope import ContextRope
from pykv.models.temperature import Temperature
from pykv.models.weights import LayerWeights, Weights

LITE = {(26, None), (27, None), (48, 128256)}
"""Layers and vocabulary of models without the queries' bottleneck, whose files may lack the key; None = any."""

SIGMOID_WITHOUT_KEY = {(47, 154880), (48, 154880)}
"""Layers and vocabulary of models whose files do not say that experts are weighted by sigmoid."""


@dataclass(frozen=True)
class DeepSeek2Layer:
    """Weights of one layer; `experts` is None where the feed-forward network is the plain one, `ffn`.

    Beside experts, `ffn` is the part that every token meets.
    """

    attn_norm: Tensor
    attention: LatentAttention
    ffn_norm: Tensor
    ffn: GatedFFN
    experts: Experts | None


class DeepSeek2(Architecture):
    """A decoder of the deepseek2 family."""

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        refuse_headless_layers(keys, hparams)
        hp, place = hparams, weights.placement
        self.hparams = hparams
        self.sizes = LatentSizes.read(keys, hp, has_q_rank=not _is_among(LITE, hp))
        self.routing = Routing.from_keys(keys, _gating(keys, hp))
        self.temperature = _temperature(keys)
        self._n_dense = keys.size("leading_dense_block_count", 0, least=0)
        self._n_ff, self._n_shared = keys.size("expert_feed_forward_length"), keys.size("expert_shared_count")
        self.tok_embd = take_embeddings(weights, hp)
        self.output_norm = weights.need("output_norm.weight", (hp.n_embd,), place.output)
        self.output = take_output(weights, hp)
        self.layers = tuple(self._take_layer(il, weights.layer(il)) for il in range(hp.n_layer))

    def _take_layer(self, il: int, w: LayerWeights) -> DeepSeek2Layer:
        hp, n, is_dense = self.hparams, self.hparams.n_embd, il < self._n_dense
        if is_dense:
            ffn = GatedFFN.take(w, n, hp.n_ff_by_layer[il])
        else:
            ffn = GatedFFN.take(w, n, self._n_ff * self._n_shared, "_shexp")
        return DeepSeek2Layer(
            attn_norm=w.need("attn_norm.weight", n),
            attention=LatentAttention.take(w, n, hp.n_head_by_layer[il], self.sizes),
            ffn_norm=w.need("ffn_norm.weight", n),
            ffn=ffn,
            experts=None if is_dense else Experts.take(w, n, self._n_ff, self.routing.n_expert),
        )

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        hp = self.hparams
        scaling = hp.rope_scaling
        if rope.ext_factor != 0 and scaling.log_multiplier:
            # YaRN's magnitude is all in the scores, see `_kq_scale`: keys and queries keep their length
            rope = replace(rope, attn_factor=scaling.attn_factor / (1.0 + 0.1 * math.log(1.0 / rope.freq_scale)))
        params = rope.params(hp.n_rot, "norm")
        return MemorySpec(tuple(self.sizes.layer_spec(n_head, params) for n_head in hp.n_head_by_layer))

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp, eps = self.hparams, self.hparams.norm_rms_eps
        x = b.embed(self.tok_embd)
        for il, layer in enumerate(self.layers):
            is_last = il == hp.n_layer - 1
            scale = self._kq_scale(b.layers[il].rope)
            h = b.rms_norm(x, layer.attn_norm, eps)
            q = layer.attention.store(b, il, h, eps)
            if self.temperature is not None:
                q = self.temperature.apply(b, q)
            if is_last and b.shape.n_outputs == 0:
                b.observe(il, q, scale)
                return None  # later tokens only need what has been stored
            h = layer.attention.read(b, il, q, scale)
            if is_last:
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(h, x)
            x = b.add(self._feed_forward(b, layer, b.rms_norm(x, layer.ffn_norm, eps)), x)
        return b.linear(b.rms_norm(x, self.output_norm, eps), self.output)

    def _kq_scale(self, rope: RopeParams | None) -> float:
        """Return the factor on scores, which holds the magnitude that YaRN asks for."""
        assert rope is not None
        stretch = math.log(1.0 / rope.freq_scale)
        # the file's multiplier is a tenth of the model's, as converters write it
        whole = rope.attn_factor * (1.0 + 0.1 * stretch) * (1.0 + self.hparams.rope_scaling.log_multiplier * stretch)
        return whole**2 / math.sqrt(self.sizes.head_k)

    def _feed_forward(self, b: GraphBuilder, layer: DeepSeek2Layer, x: Tensor) -> Tensor:
        if layer.experts is None:
            return silu_ffn(b, x, layer.ffn)
        mixed = mix_experts(b, x, layer.experts, self.routing)
        return b.add(mixed, silu_ffn(b, x, layer.ffn))


def _is_among(models: set[tuple[int, int | None]] | set[tuple[int, int]], hp: HParams) -> bool:
    return any(n_layer == hp.n_layer and n_vocab in (None, hp.n_vocab) for n_layer, n_vocab in models)


def _gating(keys: Keys, hp: HParams) -> str:
    number = keys.size("expert_gating_func", 0, least=0)
    if number == 0:
        return "sigmoid" if _is_among(SIGMOID_WITHOUT_KEY, hp) else "softmax"
    if number not in GATINGS:
        raise keys.refusal("expert_gating_func", number, f"one of {sorted(GATINGS)}")
    return GATINGS[number]


def _temperature(keys: Keys) -> Temperature | None:
    scale = keys.finite("attention.temperature_scale", 0.0)
    return Temperature(scale, keys.size("attention.temperature_length")) if scale else None
