"""Gemma 2: llama with windows on every other layer, norms after each block too, and scores and logits softly capped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pykv.cells import NO_WINDOW, SwaType, Window
from pykv.ggml import Tensor, ops
from pykv.memory import LayerSpec, MemorySpec
from pykv.models import blocks
from pykv.models.architecture import Architecture
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams, refuse_headless_layers
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights, Weights
from pykv.models.windows import WindowedRope, refuse_other_windowed_heads, windowed_layers


@dataclass(frozen=True)
class GemmaLayer:
    """Weights of one layer; `q_norm` and `k_norm` are None where heads are not normalised."""

    attn_norm: Tensor
    qkv: blocks.Projections
    q_norm: Tensor | None
    k_norm: Tensor | None
    wo: Tensor
    attn_post_norm: Tensor
    ffn_norm: Tensor
    ffn: blocks.GatedFFN
    ffn_post_norm: Tensor


class Gemma2(Architecture):
    """A decoder of the gemma family."""

    has_qk_norm: ClassVar[bool] = False
    n_layer_27b: ClassVar[int] = 46
    """Layers of the one model of the family whose scores are not divided by the root of the head's size."""

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        refuse_headless_layers(keys, hparams)
        refuse_other_windowed_heads(keys, hparams)
        self.hparams = hparams
        self._read(keys)
        hp, place = hparams, weights.placement
        self.tok_embd = blocks.take_embeddings(weights, hp)
        self.output_norm = weights.need("output_norm.weight", (hp.n_embd,), place.output)
        self.output = self._take_output(weights)
        self.layers = tuple(self._take_layer(il, weights.layer(il)) for il in range(hp.n_layer))

    def _read(self, keys: Keys) -> None:
        self.window = Window(keys.size("attention.sliding_window", 4096), SwaType.STANDARD)
        self.is_swa = windowed_layers(keys, self.hparams.n_layer, 2)
        hp = self.hparams
        self.rope_swa = WindowedRope.read(keys, hp.rope_freq_base, hp.rope_scaling.freq_scale)
        self.cap_scores = keys.positive("attn_logit_softcapping", 50.0)
        self.cap_logits = keys.positive("final_logit_softcapping", 30.0)

    def _take_output(self, weights: Weights) -> Tensor:
        """Take the token embeddings once more: the family has no other output."""
        hp = self.hparams
        return weights.need("token_embd.weight", (hp.n_embd, hp.n_vocab), weights.placement.output)

    def _take_layer(self, il: int, w: LayerWeights) -> GemmaLayer:
        hp, n = self.hparams, self.hparams.n_embd
        head = hp.n_embd_head_k
        return GemmaLayer(
            attn_norm=w.need("attn_norm.weight", n),
            qkv=blocks.Projections.take(w, hp, il),
            q_norm=w.need("attn_q_norm.weight", head) if self.has_qk_norm else None,
            k_norm=w.need("attn_k_norm.weight", head) if self.has_qk_norm else None,
            wo=w.need("attn_output.weight", hp.n_head_by_layer[il] * hp.n_embd_head_v, n),
            attn_post_norm=w.need("post_attention_norm.weight", n),
            ffn_norm=w.need("ffn_norm.weight", n),
            ffn=blocks.GatedFFN.take(w, n, hp.n_ff_by_layer[il]),
            ffn_post_norm=w.need("post_ffw_norm.weight", n),
        )

    @property
    def attention_scale(self) -> float:
        """Factor on queries."""
        hp = self.hparams
        size = hp.n_embd // hp.n_head_by_layer[0] if hp.n_layer == self.n_layer_27b else hp.n_embd_head_k
        return 1.0 / math.sqrt(size)

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        hp = self.hparams
        params = [kind.params(hp.n_rot, "neox") for kind in (rope, self.rope_swa.of(rope))]
        return MemorySpec(
            layers=tuple(
                LayerSpec(n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v, params[is_swa], is_swa=is_swa)
                for n_head_kv, is_swa in zip(hp.n_head_kv_by_layer, self.is_swa, strict=True)
            ),
            window=self.window if any(self.is_swa) else NO_WINDOW,
            logit_softcap=self.cap_scores,
        )

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp, eps = self.hparams, self.hparams.norm_rms_eps
        x = b.embed(self.tok_embd, math.sqrt(hp.n_embd))
        for il, layer in enumerate(self.layers):
            is_last = il == hp.n_layer - 1
            q = self._store(b, il, layer, b.rms_norm(x, layer.attn_norm, eps))
            if is_last and b.shape.n_outputs == 0:
                b.observe(il, q, 1.0)
                return None  # later tokens only need what has been stored
            h = b.linear(b.attend(il, q, 1.0), layer.wo)
            if is_last:
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(b.rms_norm(h, layer.attn_post_norm, eps), x)
            h = b.rms_norm(x, layer.ffn_norm, eps)
            h = ops.geglu(b.arena, b.linear(h, layer.ffn.gate), b.linear(h, layer.ffn.up))
            x = b.add(b.rms_norm(b.linear(h, layer.ffn.down), layer.ffn_post_norm, eps), x)
        x = b.rms_norm(x, self.output_norm, eps)
        return blocks.soft_cap(b, b.linear(x, self.output), self.cap_logits)

    def _store(self, b: GraphBuilder, il: int, layer: GemmaLayer, x: Tensor) -> Tensor:
        """Store K and V of a layer's input; returns its queries, scaled."""
        eps = self.hparams.norm_rms_eps
        q, k, v = blocks.project(b, layer.qkv, self.hparams, x)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = b.rms_norm(q, layer.q_norm, eps), b.rms_norm(k, layer.k_norm, eps)
        b.kv.store(il, b.rope(il, k), v)
        return ops.scale(b.arena, b.rope(il, q), self.attention_scale)
