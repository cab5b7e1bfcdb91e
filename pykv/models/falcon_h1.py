"""Falcon-H1: in each layer attention and a Mamba-2 mixer side by side on the same input; a gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from pykv.ggml import Tensor
from pykv.memory import LayerSpec
from pykv.models.blocks import Affine, affine
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import refuse_headless_layers
from pykv.models.keys import Keys
from pykv.models.mamba2_mixer import Mamba2Mixer, Mamba2Sizes
from pykv.models.mixed_decoder import MixedDecoder, MixedLayer, Mixer
from pykv.models.rope import ContextRope
from pykv.models.self_attention import SelfAttention
from pykv.models.weights import LayerWeights


@dataclass(frozen=True)
class SideBySide:
    """Two mixers of one input, whose results are added."""

    first: Mixer
    second: Mixer

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return the sum of what both make of `x` [n_embd, n_tokens]."""
        return b.add(self.first.mix(b, il, x, eps), self.second.mix(b, il, x, eps))


@dataclass(frozen=True)
class AffineFFN:
    """A gated feed-forward network that may have biases."""

    gate: Affine
    up: Affine
    down: Affine

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, n_ff: int) -> Self:
        """Take the weights of a layer."""
        return cls(
            gate=Affine.take(w, "ffn_gate", n_embd, n_ff),
            up=Affine.take(w, "ffn_up", n_embd, n_ff),
            down=Affine.take(w, "ffn_down", n_ff, n_embd),
        )

    def forward(self, b: GraphBuilder, x: Tensor) -> Tensor:
        """Return what it makes of `x` [n_embd, n_tokens]."""
        return affine(b, b.swiglu(affine(b, x, self.gate), affine(b, x, self.up)), self.down)


class FalconH1(MixedDecoder):
    """A decoder of the Falcon-H1 family."""

    nodes_per_layer: ClassVar[int] = 128  # two mixers

    def _read(self, keys: Keys) -> None:
        refuse_headless_layers(keys, self.hparams)
        self.sizes = Mamba2Sizes.read(keys)

    def _take_layer(self, il: int, w: LayerWeights) -> MixedLayer:
        hp, n = self.hparams, self.hparams.n_embd
        scan = Mamba2Mixer.take(w, n, self.sizes, needs_all=False)
        return MixedLayer(
            norm=w.need("attn_norm.weight", n),
            mixer=SideBySide(SelfAttention.take(w, hp, il, hp.kq_scale), scan),
            ffn_norm=w.need("ffn_norm", n),  # so named, without an ending
            ffn=AffineFFN.take(w, n, hp.n_ff_by_layer[il]).forward,
        )

    def _layer_spec(self, il: int, rope: ContextRope) -> LayerSpec:
        hp = self.hparams
        return LayerSpec(
            hp.n_head_kv_by_layer[il],
            hp.n_embd_head_k,
            hp.n_embd_head_v,
            rope.params(hp.n_rot, "neox"),
            state=self.sizes.state,
        )
