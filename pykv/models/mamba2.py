"""Mamba-2: Mamba with another mixer."""

from __future__ import annotations

from pykv.memory import LayerSpec
from pykv.models.keys import Keys
from pykv.models.mamba2_mixer import Mamba2Mixer, Mamba2Sizes
from pykv.models.mixed_decoder import MixedDecoder, MixedLayer
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights


class Mamba2(MixedDecoder):
    """A decoder of the Mamba-2 family."""

    def _read(self, keys: Keys) -> None:
        self.sizes = Mamba2Sizes.read(keys)

    def _take_layer(self, il: int, w: LayerWeights) -> MixedLayer:
        n = self.hparams.n_embd
        return MixedLayer(w.need("attn_norm.weight", n), Mamba2Mixer.take(w, n, self.sizes, needs_all=True))

    def _layer_spec(self, il: int, rope: ContextRope) -> LayerSpec:
        return LayerSpec.recurrent(self.sizes.state)
