"""RWKV-7: a matrix per head that decays, forgets along one direction and takes in one outer product per token.

Each token also sees the inputs of the one before it (token shift). No attention and no positions. Peng et al. 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pykv.errors import GGUFError
from pykv.ggml import Tensor, ops
from pykv.memory import LayerSpec, MemorySpec, StateSpec
from pykv.models import token_shift
from pykv.models.architecture import Architecture
from pykv.models.blocks import Affine, layer_norm, take_embeddings
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope
from pykv.models.time_mix import TimeMix, TimeMixSizes
from pykv.models.weights import LayerWeights, Weights

N_SHIFTED = 2
"""Inputs that the next token sees: those of the time mix and of the channel mix."""


@dataclass(frozen=True)
class ChannelMix:
    """Weights of one layer's feed-forward."""

    lerp: Tensor
    key: Tensor
    value: Tensor

    def forward(self, b: GraphBuilder, x: Tensor, before: Tensor) -> Tensor:
        """Return what it makes of `x` and of the tokens `before` each, both [n_embd, n_tokens]."""
        mixed = b.add(ops.mul(b.arena, ops.sub(b.arena, before, x), self.lerp), x)
        return b.linear(ops.sqr(b.arena, ops.relu(b.arena, b.linear(mixed, self.key))), self.value)


@dataclass(frozen=True)
class Rwkv7Layer:
    """Weights of one layer."""

    norm: Affine
    time_mix: TimeMix
    ffn_norm: Affine
    channel_mix: ChannelMix


class Rwkv7(Architecture):
    """A decoder of the RWKV-7 family."""

    nodes_per_layer: ClassVar[int] = 124  # some 20 of them cut the scan's operands where earlier states are kept
    nodes_per_snapshot: ClassVar[int] = 28

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        hp, place = hparams, weights.placement
        self.hparams = hparams
        if keys.size("token_shift_count", N_SHIFTED) != N_SHIFTED:
            raise GGUFError(f"{keys.path}: {keys.key('token_shift_count')} must be {N_SHIFTED}")
        self.sizes = TimeMixSizes.read(keys, hp.n_embd)

        def norm(name: str, on_output: bool) -> Affine:
            ne, device = (hp.n_embd,), place.output if on_output else place.input
            return Affine(weights.need(f"{name}.weight", ne, device), weights.need(f"{name}.bias", ne, device))

        self.tok_embd = take_embeddings(weights, hp)
        self.tok_norm = norm("token_embd_norm", False)
        self.output_norm = norm("output_norm", True)
        self.output = weights.need("output.weight", (hp.n_embd, hp.n_vocab), place.output)
        self.layers = tuple(self._take_layer(il, weights.layer(il)) for il in range(hp.n_layer))

    def _take_layer(self, il: int, w: LayerWeights) -> Rwkv7Layer:
        n, n_ff = self.hparams.n_embd, self.hparams.n_ff_by_layer[il]
        return Rwkv7Layer(
            norm=Affine.take(w, "attn_norm", n, needs_bias=True),
            time_mix=TimeMix.take(w, self.sizes, is_first=il == 0),
            ffn_norm=Affine.take(w, "attn_norm_2", n, needs_bias=True),
            channel_mix=ChannelMix(
                lerp=w.need_f32("channel_mix_lerp_k.weight", n, 1, 1),
                key=w.need("channel_mix_key.weight", n, n_ff),
                value=w.need("channel_mix_value.weight", n_ff, n),
            ),
        )

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know; there is nothing rotary."""
        n = self.hparams.n_embd
        state = StateSpec(N_SHIFTED * n, n * self.sizes.head)
        return MemorySpec.uniform(self.hparams.n_layer, LayerSpec.recurrent(state))

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        eps = self.hparams.norm_rms_eps
        x, first_value = layer_norm(b, b.embed(self.tok_embd), self.tok_norm, eps), None
        for il, layer in enumerate(self.layers):
            is_last = il == self.hparams.n_layer - 1
            past = token_shift.read(b, il, N_SHIFTED)
            h = layer_norm(b, x, layer.norm, eps)
            mixed, value = layer.time_mix.mix(b, il, h, token_shift.before(b, h, past, 0), first_value)
            first_value = value if first_value is None else first_value
            x = b.add(mixed, x)
            ffn_h = layer_norm(b, x, layer.ffn_norm, eps)
            before = token_shift.before(b, ffn_h, past, 1)
            token_shift.write(b, il, (h, ffn_h))
            if is_last:
                if b.shape.n_outputs == 0:
                    return None  # later tokens only need the states
                x, ffn_h, before = (b.select_outputs(one) for one in (x, ffn_h, before))
            x = b.add(layer.channel_mix.forward(b, ffn_h, before), x)
        return b.linear(layer_norm(b, x, self.output_norm, eps), self.output)
