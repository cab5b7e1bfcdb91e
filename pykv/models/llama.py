"""The llama family: pre-norm decoder, rotary positions, grouped-query attention, gated feed-forward.

Follows llama.cpp's graph of the same name node by node, so that logits agree bit for bit where kernels do.
Relatives that differ in a detail subclass it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pykv.ggml import Tensor
from pykv.memory import LayerSpec, MemorySpec
from pykv.models.architecture import Architecture
from pykv.models.blocks import take_embeddings
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams, refuse_headless_layers
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights, Weights


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one layer; None where the file has none."""

    attn_norm: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    bo: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_b: Tensor | None
    up_b: Tensor | None
    down_b: Tensor | None


class Llama(Architecture):
    """A decoder of the llama family."""

    rope_mode: ClassVar[str] = "norm"
    has_qk_norm: ClassVar[bool] = False

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        refuse_headless_layers(keys, hparams)
        hp, place = hparams, weights.placement
        self.hparams = hparams
        self.tok_embd = take_embeddings(weights, hp)
        self.output_norm = weights.need("output_norm.weight", (hp.n_embd,), place.output)
        self.output = weights.maybe("output.weight", (hp.n_embd, hp.n_vocab), place.output)
        if self.output is None:  # tied; a second header, since the output may live on another device
            self.output = weights.need("token_embd.weight", (hp.n_embd, hp.n_vocab), place.output)
        self.layers = tuple(self._take_layer(il, weights.layer(il)) for il in range(hp.n_layer))
        self._factors = {
            name: weights.maybe(f"{name}.weight", (hp.n_rot // 2,), place.layers[0])
            for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
        }

    def _take_layer(self, il: int, w: LayerWeights) -> LlamaLayer:
        hp, n, n_ff = self.hparams, self.hparams.n_embd, self.hparams.n_ff_by_layer[il]
        head_k, head_v = hp.n_embd_head_k, hp.n_embd_head_v
        n_head, n_head_kv = hp.n_head_by_layer[il], hp.n_head_kv_by_layer[il]
        n_q, n_k, n_v = n_head * head_k, n_head_kv * head_k, n_head_kv * head_v
        return LlamaLayer(
            attn_norm=w.need("attn_norm.weight", n),
            wq=w.need("attn_q.weight", n, n_q),
            wk=w.need("attn_k.weight", n, n_k),
            wv=w.need("attn_v.weight", n, n_v),
            wo=w.need("attn_output.weight", n_head * head_v, n),
            bq=w.maybe("attn_q.bias", n_q),
            bk=w.maybe("attn_k.bias", n_k),
            bv=w.maybe("attn_v.bias", n_v),
            bo=w.maybe("attn_output.bias", n),
            q_norm=w.need("attn_q_norm.weight", head_k) if self.has_qk_norm else None,
            k_norm=w.need("attn_k_norm.weight", head_k) if self.has_qk_norm else None,
            ffn_norm=w.need("ffn_norm.weight", n),
            gate=w.need("ffn_gate.weight", n, n_ff),
            up=w.need("ffn_up.weight", n, n_ff),
            down=w.need("ffn_down.weight", n_ff, n),
            gate_b=w.maybe("ffn_gate.bias", n_ff),
            up_b=w.maybe("ffn_up.bias", n_ff),
            down_b=w.maybe("ffn_down.bias", n),
        )

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        hp, factors = self.hparams, self._rope_factors(rope)
        params = rope.params(hp.n_rot, self.rope_mode)
        return MemorySpec(
            layers=tuple(
                LayerSpec(n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v, params, factors)
                for n_head_kv in hp.n_head_kv_by_layer
            )
        )

    def _rope_factors(self, rope: ContextRope) -> Tensor | None:
        """Return what divides the frequencies: one set for all lengths, or by the length of the context."""
        long, short = self._factors["rope_factors_long"], self._factors["rope_factors_short"]
        if self._factors["rope_freqs"] is not None:
            return self._factors["rope_freqs"]
        return long if rope.is_long else short

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp = self.hparams
        x = b.embed(self.tok_embd)
        for il, layer in enumerate(self.layers):
            is_last = il == hp.n_layer - 1
            h = b.rms_norm(x, layer.attn_norm, hp.norm_rms_eps)
            q = b.heads(b.linear(h, layer.wq, layer.bq), hp.n_embd_head_k)
            k = b.heads(b.linear(h, layer.wk, layer.bk), hp.n_embd_head_k)
            v = b.heads(b.linear(h, layer.wv, layer.bv), hp.n_embd_head_v)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = b.rms_norm(q, layer.q_norm, hp.norm_rms_eps)
                k = b.rms_norm(k, layer.k_norm, hp.norm_rms_eps)
            q, k = b.rope(il, q), b.rope(il, k)
            b.kv.store(il, k, v)
            if is_last and b.shape.n_outputs == 0:
                b.observe(il, q, hp.kq_scale)
                return None  # later tokens only need what has been stored
            h = b.attend(il, q, hp.kq_scale)
            h = b.linear(h, layer.wo, layer.bo)
            if is_last:
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(h, x)
            x = b.add(self._feed_forward(b, layer, x), x)
        x = b.rms_norm(x, self.output_norm, hp.norm_rms_eps)
        assert self.output is not None
        return b.linear(x, self.output)

    def _feed_forward(self, b: GraphBuilder, layer: LlamaLayer, x: Tensor) -> Tensor:
        h = b.rms_norm(x, layer.ffn_norm, self.hparams.norm_rms_eps)
        gated = b.swiglu(b.linear(h, layer.gate, layer.gate_b), b.linear(h, layer.up, layer.up_b))
        return b.linear(gated, layer.down, layer.down_b)
