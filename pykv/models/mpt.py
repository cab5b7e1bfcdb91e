"""MPT: distances weigh on the scores (ALiBi) instead of rotary positions; layer norms; Q, K and V from one matrix.

Some files add learned positions to the embeddings. Relatives that differ in a detail subclass it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pykv.ggml import Tensor, ops
from pykv.memory import LayerSpec, MemorySpec
from pykv.models import blocks
from pykv.models.architecture import Architecture
from pykv.models.blocks import Affine
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams, refuse_headless_layers, refuse_tensors
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights, Use, Weights

MAX_BIAS = 126.0
"""The smallest slope is 2 to the minus this; one that float32 rounds to 0 would make NaN of what is masked."""


@dataclass(frozen=True)
class MptLayer:
    """Weights of one layer, each with the bias that the file has for it."""

    attn_norm: Affine
    qkv: Affine
    wo: Affine
    ffn_norm: Affine
    up: Affine
    down: Affine


class Mpt(Architecture):
    """A decoder of the MPT family."""

    needs_bias: ClassVar[bool] = False

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        refuse_headless_layers(keys, hparams)
        refuse_tensors(keys, "attn_q_norm.weight", "attn_k_norm.weight", "ffn_act.scales")
        hp, place = hparams, weights.placement
        self.hparams = hparams
        self.tok_embd = blocks.take_embeddings(weights, hp)
        self.output_norm = Affine(
            weights.need("output_norm.weight", (hp.n_embd,), place.output),
            (weights.need if self.needs_bias else weights.maybe)("output_norm.bias", (hp.n_embd,), place.output),
        )
        self.output = blocks.take_output(weights, hp)
        self.layers = tuple(self._take_layer(il, weights.layer(il)) for il in range(hp.n_layer))
        self._take_more(weights, keys)

    def _take_more(self, weights: Weights, keys: Keys) -> None:
        """Take what relatives have otherwise."""
        self.max_bias = keys.unsigned("attention.max_alibi_bias", 0.0)
        if self.max_bias > MAX_BIAS:
            raise keys.refusal("attention.max_alibi_bias", self.max_bias, f"at most {MAX_BIAS}")
        self.clamp = keys.unsigned("attention.clamp_kqv", 0.0)
        ne = (self.hparams.n_embd, self.hparams.n_ctx_train)
        self.pos_embd = weights.maybe("position_embd.weight", ne, weights.placement.input, Use.LOOKUP)

    def _take_layer(self, il: int, w: LayerWeights) -> MptLayer:
        hp, n, n_ff = self.hparams, self.hparams.n_embd, self.hparams.n_ff_by_layer[il]
        n_head, n_head_kv = hp.n_head_by_layer[il], hp.n_head_kv_by_layer[il]
        n_qkv = (n_head + n_head_kv) * hp.n_embd_head_k + n_head_kv * hp.n_embd_head_v
        needs_bias = self.needs_bias
        return MptLayer(
            attn_norm=Affine.take(w, "attn_norm", n, needs_bias=needs_bias),
            qkv=Affine.take(w, "attn_qkv", n, n_qkv, needs_bias=needs_bias),
            wo=Affine.take(w, "attn_output", n_head * hp.n_embd_head_v, n, needs_bias=needs_bias),
            ffn_norm=Affine.take(w, "ffn_norm", n, needs_bias=needs_bias),
            up=Affine.take(w, "ffn_up", n, n_ff, needs_bias=needs_bias),
            down=Affine.take(w, "ffn_down", n_ff, n, needs_bias=needs_bias),
        )

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know; there is nothing rotary."""
        hp = self.hparams
        return MemorySpec(
            layers=tuple(LayerSpec(n, hp.n_embd_head_k, hp.n_embd_head_v) for n in hp.n_head_kv_by_layer),
            absolute_positions=self.pos_embd is not None,
            alibi_max_bias=self.max_bias,
        )

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp = self.hparams
        x = self._embed(b)
        for il, layer in enumerate(self.layers):
            is_last = il == hp.n_layer - 1
            q, k, v = self._qkv(b, il, blocks.layer_norm(b, x, layer.attn_norm, hp.norm_rms_eps))
            b.kv.store(il, k, v)
            if is_last and b.shape.n_outputs == 0:
                b.observe(il, q, hp.kq_scale)
                return None  # later tokens only need what has been stored
            h = b.linear(b.attend(il, q, hp.kq_scale), layer.wo.weight, layer.wo.bias)
            if is_last:
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(h, x)
            h = blocks.layer_norm(b, x, layer.ffn_norm, hp.norm_rms_eps)
            h = ops.gelu(b.arena, b.linear(h, layer.up.weight, layer.up.bias))
            x = b.add(b.linear(h, layer.down.weight, layer.down.bias), x)
        x = blocks.layer_norm(b, x, self.output_norm, hp.norm_rms_eps)
        return b.linear(x, self.output)

    def _embed(self, b: GraphBuilder) -> Tensor:
        x = b.embed(self.tok_embd)
        return x if self.pos_embd is None else b.add(x, ops.get_rows(b.arena, self.pos_embd, b.positions))

    def _qkv(self, b: GraphBuilder, il: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hp, layer = self.hparams, self.layers[il]
        h = b.linear(h, layer.qkv.weight, layer.qkv.bias)
        if self.clamp:
            h = ops.clamp(b.arena, h, -self.clamp, self.clamp)
        heads = hp.n_head_by_layer[il], hp.n_head_kv_by_layer[il]
        return blocks.split_qkv(b, h, *heads, hp.n_embd_head_k, hp.n_embd_head_v)
