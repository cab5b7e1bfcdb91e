"""gpt-oss: llama with experts in every layer, windows on every other one, biases, and sinks in the softmax."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.cells import SwaType, Window
from pykv.errors import GGUFError
from pykv.ggml import Tensor, ops
from pykv.memory import LayerSpec, MemorySpec
from pykv.models.architecture import Architecture
from pykv.models.blocks import Affine, Projections, affine, project, take_embeddings
from pykv.models.experts import Experts, Routing, mix_experts
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams, refuse_headless_layers
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights, Weights
from pykv.models.windows import WindowedRope, refuse_other_windowed_heads, windowed_layers

ALPHA, LIMIT = 1.702, 7.0
"""Steepness of the experts' gate, and where gate and up are cut off."""


@dataclass(frozen=True)
class GptOssLayer:
    """Weights of one layer.

    Attributes
    ----------
    sinks : [n_head] f32, scores of a cell without content.
    """

    attn_norm: Tensor
    qkv: Projections
    out: Affine
    sinks: Tensor
    ffn_norm: Tensor
    experts: Experts


class GptOss(Architecture):
    """A decoder of the gpt-oss family."""

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        refuse_headless_layers(keys, hparams)
        refuse_other_windowed_heads(keys, hparams)
        hp, place = hparams, weights.placement
        if not hp.n_rot == hp.n_embd_head_k == hp.n_embd_head_v:
            sizes = f"heads of {hp.n_embd_head_k} and {hp.n_embd_head_v}, {hp.n_rot} of them rotated"
            raise GGUFError(f"{keys.path}: {sizes}: this family rotates whole heads of one size")
        self.hparams = hparams
        self._windowed_rope = WindowedRope.read(keys, hp.rope_freq_base, hp.rope_scaling.freq_scale)
        self.window = Window(keys.size("attention.sliding_window"), SwaType.STANDARD)
        self.is_swa = windowed_layers(keys, hp.n_layer, 2)
        self.routing = Routing.from_keys(keys, "softmax_of_chosen")
        self._n_ff = keys.size("expert_feed_forward_length")
        self.tok_embd = take_embeddings(weights, hp)
        self.output_norm = weights.need("output_norm.weight", (hp.n_embd,), place.output)
        self.output = weights.need("output.weight", (hp.n_embd, hp.n_vocab), place.output)
        self.layers = tuple(self._take_layer(il, weights.layer(il)) for il in range(hp.n_layer))

    def _take_layer(self, il: int, w: LayerWeights) -> GptOssLayer:
        hp, n, n_head = self.hparams, self.hparams.n_embd, self.hparams.n_head_by_layer[il]
        return GptOssLayer(
            attn_norm=w.need("attn_norm.weight", n),
            qkv=Projections.take(w, hp, il),
            out=Affine.take(w, "attn_output", n_head * hp.n_embd_head_v, n),
            sinks=w.need("attn_sinks.weight", n_head),
            ffn_norm=w.need("post_attention_norm.weight", n),
            experts=Experts.take(w, n, self._n_ff, self.routing.n_expert),
        )

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        hp = self.hparams
        kinds = {False: rope.params(hp.n_rot, "neox"), True: self._windowed_rope.of(rope).params(hp.n_rot, "neox")}
        layers = (
            LayerSpec(n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v, kinds[is_swa], is_swa=is_swa)
            for n_head_kv, is_swa in zip(hp.n_head_kv_by_layer, self.is_swa, strict=True)
        )
        return MemorySpec(tuple(layers), window=self.window)

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp, scale = self.hparams, float(self.hparams.n_rot) ** -0.5
        x = b.embed(self.tok_embd)
        for il, layer in enumerate(self.layers):
            is_last = il == hp.n_layer - 1
            q, k, v = project(b, layer.qkv, hp, b.rms_norm(x, layer.attn_norm, hp.norm_rms_eps))
            q, k = b.rope(il, q), b.rope(il, k)
            b.kv.store(il, k, v)
            if is_last and b.shape.n_outputs == 0:
                b.observe(il, q, scale, layer.sinks)
                return None  # later tokens only need what has been stored
            h = affine(b, b.attend(il, q, scale, layer.sinks), layer.out)
            if is_last:
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(h, x)
            h = b.rms_norm(x, layer.ffn_norm, hp.norm_rms_eps)
            x = b.add(mix_experts(b, h, layer.experts, self.routing, oai_gate), x)
        return b.linear(b.rms_norm(x, self.output_norm, hp.norm_rms_eps), self.output)


def oai_gate(b: GraphBuilder, gate: Tensor, up: Tensor) -> Tensor:
    """Return the experts' activation: both are cut off, and the second counts one more than it is."""
    return ops.swiglu_oai(b.arena, gate, up, ALPHA, LIMIT)
