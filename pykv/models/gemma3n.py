"""Gemma 3n: Gemma 3 with several residual streams, a low-rank bypass, and an embedding of each token for each layer.

The last layers have no K and V of their own: they read those of the last layer of their kind that has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from pykv.batch import UBatch
from pykv.cells import SwaType, Window
from pykv.errors import GGUFError
from pykv.ggml import DType, Tensor, ops
from pykv.memory import MemorySpec
from pykv.models import altup, blocks
from pykv.models.gemma2 import Gemma2, GemmaLayer
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights, Use, Weights
from pykv.models.windows import WindowedRope, windowed_layers
from pykv.typing import AnyArray

N_LAYER_WITH_KV, N_LAYER_SPARSE, SPARSITY = 20, 10, 1.6448533535003662
"""What holds where a file says nothing: layers with K and V, those with sparse activations, and how sparse these are:
so many deviations above the mean an activation must be."""


@dataclass(frozen=True)
class Bypass:
    """What goes past attention and the streams in one layer: Laurel's two thin matrices, and the layer's embedding."""

    left: Tensor
    right: Tensor
    norm: Tensor
    streams: altup.AltUpLayer
    correct_scale: Tensor
    gate: Tensor
    proj: Tensor
    post_norm: Tensor

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, rank: int, n_per_layer: int, n_stream: int) -> Self:
        """Take those of one layer."""
        return cls(
            left=w.need("laurel_l.weight", n_embd, rank),
            right=w.need("laurel_r.weight", rank, n_embd),
            norm=w.need("laurel_post_norm.weight", n_embd),
            streams=altup.AltUpLayer.take(w, n_embd, n_stream),
            correct_scale=w.need("altup_correct_scale.weight", n_embd),
            gate=w.need("inp_gate.weight", n_embd, n_per_layer),
            proj=w.need("proj.weight", n_per_layer, n_embd),
            post_norm=w.need("post_norm.weight", n_embd),
        )


class Gemma3n(Gemma2):
    """A decoder of the gemma3n family."""

    has_qk_norm: ClassVar[bool] = True
    nodes_per_layer: ClassVar[int] = 176

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        super().__init__(hparams, weights, keys)
        hp, n, place = hparams, self.n_per_layer, weights.placement
        wide = n * hp.n_layer
        self.altup = altup.AltUp.take(weights, hp, self.n_stream)
        self.layer_embd = weights.need("per_layer_token_embd.weight", (wide, hp.n_vocab), place.input, Use.LOOKUP)
        self.layer_proj = weights.need("per_layer_model_proj.weight", (hp.n_embd, wide), place.layers[0])
        self.layer_norm = weights.need("per_layer_proj_norm.weight", (n,), place.layers[0])
        laurel = keys.tensors.get("blk.0.laurel_l.weight")
        rank = 64 if laurel is None else laurel.ne[1]
        self.bypasses = tuple(
            Bypass.take(weights.layer(il), hp.n_embd, rank, n, self.n_stream) for il in range(hp.n_layer)
        )

    def _read(self, keys: Keys) -> None:
        n_layer = self.hparams.n_layer
        self.window = Window(keys.size("attention.sliding_window"), SwaType.STANDARD)
        self.is_swa = windowed_layers(keys, n_layer, 5)
        self.rope_swa = WindowedRope.read(keys, 10000.0, 1.0)
        # differs from llama.cpp: the cap, the layers that share K and V and those that are sparse are the file's
        # (there: 30, from layer 20 on, the first 10, whatever the file says), because the file knows its model
        self.cap_scores, self.cap_logits = 0.0, keys.positive("final_logit_softcapping", 30.0)
        self.n_stream = keys.size("altup.num_inputs", 4, least=2)
        if keys.size("altup.active_idx", 0, least=0):
            raise keys.refusal("altup.active_idx", keys.size("altup.active_idx"), "0, the stream that is computed with")
        self.n_per_layer = keys.size("embedding_length_per_layer_input", 256)
        self.sparsity = _sparsity(keys, n_layer)
        self.reuse = self._reuse(keys)

    def _reuse(self, keys: Keys) -> dict[int, int]:
        """Return whose K and V the layers without any read."""
        n_layer, name = self.hparams.n_layer, "attention.shared_kv_layers"
        n_shared = keys.size(name, max(0, n_layer - N_LAYER_WITH_KV), least=0)
        n_own = n_layer - n_shared
        if n_shared and not 2 <= n_own <= n_layer:
            raise keys.refusal(name, n_shared, f"at most {n_layer - 2}: two layers have K and V of their own")
        sources = {True: n_own - 2, False: n_own - 1}
        reuse = {il: sources[self.is_swa[il]] for il in range(n_own, n_layer)}
        for il, source in reuse.items():
            if self.is_swa[source] != self.is_swa[il]:
                raise GGUFError(f"{keys.path}: layer {il} cannot read layer {source}: only one of them has a window")
        return reuse

    def _take_output(self, weights: Weights) -> Tensor:
        return blocks.take_output(weights, self.hparams)

    @property
    def attention_scale(self) -> float:
        """Factor on queries."""
        return 1.0

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        return replace(super().memory_spec(rope), reuse=self.reuse)

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp, eps = self.hparams, self.hparams.norm_rms_eps
        x = b.embed(self.tok_embd, math.sqrt(hp.n_embd))
        of_layers = self._of_layers(b, x)
        streams = altup.spread(b, self.altup, x)
        last = hp.n_layer - 1 if b.shape.n_outputs else self._last_needed(b)
        for il, (layer, bypass) in enumerate(zip(self.layers, self.bypasses, strict=True)):
            predictions = altup.predict(b, bypass.streams, streams, eps)
            x = altup.first(b, predictions)
            h = b.rms_norm(x, layer.attn_norm, eps)
            q = self._query(b, il, layer, h)
            if il == last and b.shape.n_outputs == 0:
                b.observe(il, q, self.attention_scale)
                return None  # later tokens only need what has been stored
            attended = b.linear(b.attend(il, q, self.attention_scale), layer.wo)
            x = b.add(b.rms_norm(attended, layer.attn_post_norm, eps), x)
            x = ops.scale(b.arena, b.add(x, self._laurel(b, bypass, h)), 1.0 / math.sqrt(2.0))
            x = b.add(self._feed_forward(b, il, layer, x), x)
            streams = altup.correct(b, bypass.streams, predictions, x, eps)
            streams = self._add_of_layer(b, bypass, streams, altup.matrix(b, of_layers, il))
        x = b.select_outputs(altup.merge(b, self.altup, streams))
        x = b.rms_norm(x, self.output_norm, eps)
        return blocks.soft_cap(b, b.linear(x, self.output), self.cap_logits)

    def _last_needed(self, b: GraphBuilder) -> int:
        """Return the last layer that stores something, or that is observed."""
        return max(il for il in range(self.hparams.n_layer) if il not in self.reuse or b.kv.observes(il))

    def _of_layers(self, b: GraphBuilder, x: Tensor) -> Tensor:
        """Return what each layer is told of each token, [n_per_layer, n_tokens, n_layer]."""
        hp, n = self.hparams, self.n_per_layer
        if b.shape.from_embeddings:  # what is no token has the padding token's, the first one's
            own = ops.get_rows(b.arena, self.layer_embd, b.input(DType.I32, (1,), "padding_token", _write_zero))
        else:
            own = ops.get_rows(b.arena, self.layer_embd, b.tokens)
        own = ops.scale(b.arena, ops.reshape(b.arena, own, n, hp.n_layer, own.ne[1]), math.sqrt(n))
        seen = ops.scale(b.arena, b.linear(x, self.layer_proj), 1.0 / math.sqrt(hp.n_embd))
        seen = ops.reshape(b.arena, seen, n, hp.n_layer, x.ne[1])
        both = b.add(b.rms_norm(seen, self.layer_norm, hp.norm_rms_eps), own)
        both = ops.scale(b.arena, both, 1.0 / math.sqrt(2.0))
        return ops.cont(b.arena, ops.permute(b.arena, both, 0, 2, 1, 3))

    def _query(self, b: GraphBuilder, il: int, layer: GemmaLayer, x: Tensor) -> Tensor:
        """Store K and V of a layer's input, if the layer has any; returns its queries."""
        eps, head = self.hparams.norm_rms_eps, self.hparams.n_embd_head_k
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        if il in self.reuse:
            q = b.heads(blocks.affine(b, x, layer.qkv.q), head)
        else:
            q, k, v = blocks.project(b, layer.qkv, self.hparams, x)
            k = b.rope(il, b.rms_norm(k, layer.k_norm, eps))
            b.kv.store(il, k, ops.rms_norm(b.arena, v, eps))
        return b.rope(il, b.rms_norm(q, layer.q_norm, eps))

    def _laurel(self, b: GraphBuilder, bypass: Bypass, x: Tensor) -> Tensor:
        h = b.linear(b.linear(x, bypass.left), bypass.right)
        return b.add(b.rms_norm(h, bypass.norm, self.hparams.norm_rms_eps), x)

    def _feed_forward(self, b: GraphBuilder, il: int, layer: GemmaLayer, x: Tensor) -> Tensor:
        h = b.rms_norm(x, layer.ffn_norm, self.hparams.norm_rms_eps)
        up, gate = b.linear(h, layer.ffn.up), b.linear(h, layer.ffn.gate)
        if self.sparsity[il]:
            gate = _largest(b, gate, self.sparsity[il])
        h = b.linear(ops.mul(b.arena, up, ops.gelu(b.arena, gate)), layer.ffn.down)
        return b.rms_norm(h, layer.ffn_post_norm, self.hparams.norm_rms_eps)

    def _add_of_layer(self, b: GraphBuilder, bypass: Bypass, streams: Tensor, of_layer: Tensor) -> Tensor:
        """Add to all streams but the first what the layer's embedding makes of that one."""
        x = ops.mul(b.arena, altup.first(b, streams), bypass.correct_scale)
        x = ops.mul(b.arena, ops.gelu(b.arena, b.linear(x, bypass.gate)), of_layer)
        x = b.rms_norm(b.linear(x, bypass.proj), bypass.post_norm, self.hparams.norm_rms_eps)
        return ops.concat(b.arena, altup.first(b, streams), b.add(altup.rest(b, streams), x), 2)


def _sparsity(keys: Keys, n_layer: int) -> tuple[float, ...]:
    """Return for each layer how many deviations above the mean an activation must be; 0 = all pass."""
    key = keys.key("activation_sparsity_scale")
    if key not in keys.meta:
        return tuple(SPARSITY if il < N_LAYER_SPARSE else 0.0 for il in range(n_layer))
    scales = np.asarray(keys.meta[key])
    if scales.shape != (n_layer,) or scales.dtype.kind != "f" or not np.isfinite(scales).all() or scales.min() < 0:
        raise GGUFError(f"{keys.path}: {key} must hold one number, not negative, for each of the {n_layer} layers")
    return tuple(float(scale) for scale in scales)


def _largest(b: GraphBuilder, x: Tensor, n_deviations: float) -> Tensor:
    """Return what exceeds each column's mean by so many deviations, less that; 0 elsewhere."""
    mean = ops.mean(b.arena, x)
    squares = ops.sum_rows(b.arena, ops.sqr(b.arena, ops.sub(b.arena, x, mean)))
    deviation = ops.sqrt(b.arena, ops.scale(b.arena, squares, 1.0 / (x.ne[0] - 1)))
    least = b.add(mean, ops.scale(b.arena, deviation, n_deviations))
    return ops.relu(b.arena, ops.sub(b.arena, x, least))


def _write_zero(array: AnyArray, _: UBatch) -> None:
    array[:] = 0
