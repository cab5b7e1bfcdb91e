"""Qwen3-Next: most layers are gated delta nets, the others attend and gate what they saw; experts in each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from pykv.ggml import Tensor, ops
from pykv.memory import LayerSpec
from pykv.models.blocks import Affine, GatedFFN, affine, silu_ffn
from pykv.models.delta_net import DeltaNet, DeltaSizes
from pykv.models.experts import Experts, Routing, mix_experts
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams, refuse_headless_layers, refuse_tensors
from pykv.models.keys import Keys
from pykv.models.mixed_decoder import MixedDecoder, MixedLayer
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights

EVERY = 4
"""One layer of so many attends, where the file does not say which."""


@dataclass(frozen=True)
class GatedAttention:
    """Weights of an attention whose query matrix also makes a gate, head by head."""

    hparams: HParams
    q_and_gate: Affine
    k: Affine
    v: Affine
    q_norm: Tensor
    k_norm: Tensor
    wo: Tensor

    @classmethod
    def take(cls, w: LayerWeights, hp: HParams, il: int) -> Self:
        """Take the weights of layer `il`."""
        n, head, n_head, n_head_kv = hp.n_embd, hp.n_embd_head_k, hp.n_head_by_layer[il], hp.n_head_kv_by_layer[il]
        return cls(
            hparams=hp,
            q_and_gate=Affine.take(w, "attn_q", n, 2 * head * n_head),
            k=Affine.take(w, "attn_k", n, head * n_head_kv),
            v=Affine.take(w, "attn_v", n, head * n_head_kv),
            q_norm=w.need("attn_q_norm.weight", head),
            k_norm=w.need("attn_k_norm.weight", head),
            wo=w.need("attn_output.weight", head * n_head, n),
        )

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return what the tokens of `x` [n_embd, n_tokens] see and let through; their K and V are stored."""
        arena, head = b.arena, self.hparams.n_embd_head_k
        both = b.heads(affine(b, x, self.q_and_gate), 2 * head)

        def half(at: int) -> Tensor:
            return ops.view(arena, both, (head, *both.ne[1:]), both.nb[1:], at * head * both.nb[0])

        q = b.rope(il, b.rms_norm(half(0), self.q_norm, eps))
        k = b.rope(il, b.rms_norm(b.heads(affine(b, x, self.k), head), self.k_norm, eps))
        b.kv.store(il, k, b.heads(affine(b, x, self.v), head))
        seen = b.attend(il, q, self.hparams.kq_scale)
        gate = ops.reshape(arena, ops.cont(arena, half(1)), *seen.ne[:2])
        return b.linear(ops.mul(arena, seen, ops.sigmoid(arena, gate)), self.wo)


@dataclass(frozen=True)
class SharedAndChosen:
    """Experts that a token chooses, and one that every token meets, as far as its gate lets it through."""

    experts: Experts
    routing: Routing
    shared: GatedFFN
    shared_gate: Tensor

    def forward(self, b: GraphBuilder, x: Tensor) -> Tensor:
        """Return what all of them make of `x` [n_embd, n_tokens]."""
        chosen = mix_experts(b, x, self.experts, self.routing)
        open_by = ops.sigmoid(b.arena, b.linear(x, self.shared_gate))
        return b.add(chosen, ops.mul(b.arena, silu_ffn(b, x, self.shared), open_by))


class Qwen3Next(MixedDecoder):
    """A decoder of the Qwen3-Next family."""

    def _read(self, keys: Keys) -> None:
        refuse_tensors(keys, "ssm_in.weight")  # an older layout of what the delta nets are given
        hp = self.hparams
        refuse_headless_layers(keys, hp)
        if hp.n_embd_head_k != hp.n_embd_head_v:
            raise keys.refusal("attention.value_length", hp.n_embd_head_v, f"as long as a key, {hp.n_embd_head_k}")
        self.sizes = DeltaSizes.read(keys)
        # the weights of the chosen experts add up to 1, whatever the file says
        self.routing = replace(Routing.from_keys(keys, "softmax"), is_normed=True)
        self.n_ff_exp = keys.size("expert_feed_forward_length", 0, least=0)
        self.n_ff_shared = keys.size("expert_shared_feed_forward_length", 0, least=0)
        self.is_delta = _delta_layers(keys, hp.n_layer)

    def _take_layer(self, il: int, w: LayerWeights) -> MixedLayer:
        hp, n = self.hparams, self.hparams.n_embd
        n_ff = self.n_ff_exp or hp.n_ff_by_layer[il] // self.routing.n_used
        ffn = SharedAndChosen(
            experts=Experts.take(w, n, n_ff, self.routing.n_expert),
            routing=self.routing,
            shared=GatedFFN.take(w, n, self.n_ff_shared or hp.n_ff_by_layer[il], "_shexp"),
            shared_gate=w.need("ffn_gate_inp_shexp.weight", n),
        )
        return MixedLayer(
            norm=w.need("attn_norm.weight", n),
            mixer=DeltaNet.take(w, n, self.sizes) if self.is_delta[il] else GatedAttention.take(w, hp, il),
            ffn_norm=w.need("post_attention_norm.weight", n),
            ffn=ffn.forward,
        )

    def _layer_spec(self, il: int, rope: ContextRope) -> LayerSpec:
        if self.is_delta[il]:
            return LayerSpec.recurrent(self.sizes.state)
        hp = self.hparams
        head, n_head_kv = hp.n_embd_head_k, hp.n_head_kv_by_layer[il]
        return LayerSpec(n_head_kv, head, head, rope.params(hp.n_rot, "neox"))


def _delta_layers(keys: Keys, n_layer: int) -> tuple[bool, ...]:
    """Tell for each layer whether it is a delta net."""
    if keys.key("attention.recurrent_layers") in keys.meta:
        return tuple(flag > 0 for flag in keys.per_layer("attention.recurrent_layers", n_layer))
    every = keys.size("full_attention_interval", EVERY)
    return tuple((il + 1) % every != 0 for il in range(n_layer))
