"""Mamba-2: Mamba with another mixer."""

from __future__ import annotations

from pykv.models.keys import Keys
from pykv.models.mamba import Mamba, MambaLayer
from pykv.models.mamba2_mixer import Mamba2Mixer, Mamba2Sizes
from pykv.models.weights import LayerWeights


class Mamba2(Mamba):
    """A decoder of the Mamba-2 family."""

    def _read(self, keys: Keys) -> None:
        self.heads = Mamba2Sizes.read(keys)
        self.state = self.heads.state

    def _take_layer(self, w: LayerWeights) -> MambaLayer:
        n = self.hparams.n_embd
        return MambaLayer(w.need("attn_norm.weight", n), Mamba2Mixer.take(w, n, self.heads, needs_all=True))
