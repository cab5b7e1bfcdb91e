"""Llama 4, its text part: windows in chunks, whole layers without RoPE, and experts beside one that all tokens meet."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.cells import SwaType, Window
from pykv.errors import GGUFError
from pykv.ggml import Tensor, ops
from pykv.memory import LayerSpec, MemorySpec
from pykv.models.architecture import Architecture
from pykv.models.blocks import Affine, GatedFFN, Projections, affine, project, silu_ffn, take_embeddings, take_output
from pykv.models.experts import Experts, Routing, mix_experts
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams, refuse_headless_layers
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope
from pykv.models.temperature import Temperature
from pykv.models.weights import LayerWeights, Weights
from pykv.models.windows import WindowedRope, refuse_other_windowed_heads, windowed_layers

CHUNK = 8192
"""Positions that see one another in layers with a window; no key of a file changes it."""

TEMPERATURE = Temperature(scale=0.1, length=CHUNK, offset=1)
"""Of layers without RoPE."""

NO_ROPE_EVERY, DENSE_EVERY = 4, 4
"""Every fourth layer is without RoPE; every fourth, if the file does not say otherwise, is without a window."""

N_EXPERT_WITHOUT_NORM = 128
"""The model with so many experts does not norm Q and K."""


@dataclass(frozen=True)
class Llama4Layer:
    """Weights of one layer; `experts` is None where the feed-forward network is the plain one, `ffn`.

    Beside experts, `ffn` is the part that every token meets.
    """

    attn_norm: Tensor
    qkv: Projections
    out: Affine
    ffn_norm: Tensor
    ffn: GatedFFN
    experts: Experts | None


class Llama4(Architecture):
    """A decoder of the llama4 family."""

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        _refuse(keys, hparams)
        hp, place = hparams, weights.placement
        self.hparams = hparams
        self._windowed_rope = WindowedRope.read(keys, hp.rope_freq_base, hp.rope_scaling.freq_scale)
        self.is_swa = windowed_layers(keys, hp.n_layer, DENSE_EVERY)
        self.routing = Routing.from_keys(keys, "sigmoid", chooses_by_score=True, weighs_input=True)
        self.has_qk_norm = self.routing.n_expert != N_EXPERT_WITHOUT_NORM
        self._n_ff = keys.size("expert_feed_forward_length")
        self._experts_every = keys.size("interleave_moe_layer_step", least=0)
        self.tok_embd = take_embeddings(weights, hp)
        self.output_norm = weights.need("output_norm.weight", (hp.n_embd,), place.output)
        self.output = take_output(weights, hp)
        self.rope_factors = weights.maybe("rope_freqs.weight", (hp.n_rot // 2,), place.layers[0])
        self.layers = tuple(self._take_layer(il, weights.layer(il)) for il in range(hp.n_layer))

    def _take_layer(self, il: int, w: LayerWeights) -> Llama4Layer:
        hp, n = self.hparams, self.hparams.n_embd
        is_routed = self._experts_every > 0 and (il + 1) % self._experts_every == 0
        return Llama4Layer(
            attn_norm=w.need("attn_norm.weight", n),
            qkv=Projections.take(w, hp, il),
            out=Affine.take(w, "attn_output", hp.n_head_by_layer[il] * hp.n_embd_head_v, n),
            ffn_norm=w.need("ffn_norm.weight", n),
            ffn=GatedFFN.take(w, n, self._n_ff, "_shexp") if is_routed else GatedFFN.take(w, n, hp.n_ff_by_layer[il]),
            experts=Experts.take(w, n, self._n_ff, self.routing.n_expert) if is_routed else None,
        )

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        hp = self.hparams
        kinds = {False: rope.params(hp.n_rot, "norm"), True: self._windowed_rope.of(rope).params(hp.n_rot, "norm")}
        # differs from llama.cpp: keys without RoPE do not turn when positions move (there: as if they had it)
        ropes = (None if _lacks_rope(il) else kinds[is_swa] for il, is_swa in enumerate(self.is_swa))
        layers = (
            LayerSpec(n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v, one, self.rope_factors, is_swa=is_swa)
            for n_head_kv, one, is_swa in zip(hp.n_head_kv_by_layer, ropes, self.is_swa, strict=True)
        )
        return MemorySpec(tuple(layers), window=Window(CHUNK, SwaType.CHUNKED))

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp, eps = self.hparams, self.hparams.norm_rms_eps
        x = b.embed(self.tok_embd)
        for il, layer in enumerate(self.layers):
            is_last = il == hp.n_layer - 1
            q, k, v = project(b, layer.qkv, hp, b.rms_norm(x, layer.attn_norm, eps))
            q, k = self._placed(b, il, q, k)
            b.kv.store(il, k, v)
            if is_last and b.shape.n_outputs == 0:
                b.observe(il, q, hp.kq_scale)
                return None  # later tokens only need what has been stored
            h = affine(b, b.attend(il, q, hp.kq_scale), layer.out)
            if is_last:
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(h, x)
            x = b.add(self._feed_forward(b, layer, b.rms_norm(x, layer.ffn_norm, eps)), x)
        return b.linear(b.rms_norm(x, self.output_norm, eps), self.output)

    def _placed(self, b: GraphBuilder, il: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q and K as their positions make them."""
        if _lacks_rope(il):
            return TEMPERATURE.apply(b, q), k
        q, k = b.rope(il, q), b.rope(il, k)
        if self.has_qk_norm:
            q, k = (ops.rms_norm(b.arena, one, self.hparams.norm_rms_eps) for one in (q, k))
        return q, k

    def _feed_forward(self, b: GraphBuilder, layer: Llama4Layer, x: Tensor) -> Tensor:
        if layer.experts is None:
            return silu_ffn(b, x, layer.ffn)
        mixed = mix_experts(b, x, layer.experts, self.routing)
        return b.add(mixed, silu_ffn(b, x, layer.ffn))


def _lacks_rope(il: int) -> bool:
    return (il + 1) % NO_ROPE_EVERY == 0


def _refuse(keys: Keys, hp: HParams) -> None:
    refuse_headless_layers(keys, hp)
    refuse_other_windowed_heads(keys, hp)
    if not hp.n_rot == hp.n_embd_head_k == hp.n_embd_head_v:
        sizes = f"heads of {hp.n_embd_head_k} and {hp.n_embd_head_v}, {hp.n_rot} of them rotated"
        raise GGUFError(f"{keys.path}: {sizes}: this family rotates whole heads of one size")
    if keys.size("attention.sliding_window", CHUNK, least=0) == 0:
        # as in llama.cpp, which ends the process
        raise GGUFError(f"{keys.path}: {keys.key('attention.sliding_window')}=0: not supported without a window")
