"""Jamba: Mamba layers with norms inside, a few that attend without positions; experts in some, else a feed-forward."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from pykv.memory import LayerSpec
from pykv.models import blocks, experts
from pykv.models.keys import Keys
from pykv.models.mamba_mixer import NODES_PER_STEP, MambaMixer, MambaSizes, Norms
from pykv.models.mixed_decoder import FeedForward, MixedDecoder, MixedLayer, Mixer
from pykv.models.rope import ContextRope
from pykv.models.self_attention import SelfAttention
from pykv.models.weights import LayerWeights


class Jamba(MixedDecoder):
    """A decoder of the Jamba family."""

    nodes_per_snapshot: ClassVar[int] = NODES_PER_STEP

    def _read(self, keys: Keys) -> None:
        self.sizes = MambaSizes.read(keys)
        self.routing = None
        if keys.size("expert_count", 0, least=0):
            self.routing = experts.Routing.from_keys(keys, "softmax")

    def _take_layer(self, il: int, w: LayerWeights) -> MixedLayer:
        n = self.hparams.n_embd
        return MixedLayer(
            norm=w.need("attn_norm.weight", n),
            mixer=self._take_mixer(il, w),
            ffn_norm=w.need("ffn_norm.weight", n),
            ffn=self._take_ffn(il, w),
        )

    def _take_mixer(self, il: int, w: LayerWeights) -> Mixer:
        hp = self.hparams
        if hp.n_head_kv_by_layer[il]:
            return SelfAttention.take(w, hp, il, float(hp.n_embd_head_v) ** -0.5)
        return MambaMixer.take(w, hp.n_embd, self.sizes, Norms.take(w, self.sizes))

    def _take_ffn(self, il: int, w: LayerWeights) -> FeedForward:
        """Take experts where the file has a router for them."""
        n, n_ff, routing = self.hparams.n_embd, self.hparams.n_ff_by_layer[il], self.routing
        if routing is None or not w.has("ffn_gate_inp.weight"):
            return partial(blocks.silu_ffn, ffn=blocks.GatedFFN.take(w, n, n_ff))
        taken = experts.Experts.take(w, n, n_ff, routing.n_expert)
        return partial(experts.mix_experts, experts=taken, routing=routing)

    def _layer_spec(self, il: int, rope: ContextRope) -> LayerSpec:
        hp, n_head_kv = self.hparams, self.hparams.n_head_kv_by_layer[il]
        if not n_head_kv:
            return LayerSpec.recurrent(self.sizes.state)
        return LayerSpec(n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v)
