"""Mamba: no attention and no feed-forward; each layer is a norm and a mixer that scans."""

from __future__ import annotations

from typing import ClassVar

from pykv.memory import LayerSpec
from pykv.models.keys import Keys
from pykv.models.mamba_mixer import NODES_PER_STEP, MambaMixer, MambaSizes, Norms
from pykv.models.mixed_decoder import MixedDecoder, MixedLayer
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights


class Mamba(MixedDecoder):
    """A decoder of the Mamba family."""

    nodes_per_snapshot: ClassVar[int] = NODES_PER_STEP

    def _read(self, keys: Keys) -> None:
        self.sizes = MambaSizes.read(keys)
        self.norms = Norms() if keys.flag("ssm.dt_b_c_rms", False) else None

    def _take_layer(self, il: int, w: LayerWeights) -> MixedLayer:
        n = self.hparams.n_embd
        return MixedLayer(w.need("attn_norm.weight", n), MambaMixer.take(w, n, self.sizes, self.norms))

    def _layer_spec(self, il: int, rope: ContextRope) -> LayerSpec:
        return LayerSpec.recurrent(self.sizes.state)
