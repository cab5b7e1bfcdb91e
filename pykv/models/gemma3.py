"""Gemma 3: Gemma 2 with windows on five of six layers, another RoPE base there, norms of Q and K, nothing capped."""

from __future__ import annotations

from typing import ClassVar

from pykv.cells import NO_WINDOW, SwaType, Window
from pykv.ggml import Tensor
from pykv.models import blocks
from pykv.models.gemma2 import Gemma2
from pykv.models.keys import Keys
from pykv.models.weights import Weights
from pykv.models.windows import WindowedRope, windowed_layers


class Gemma3(Gemma2):
    """A decoder of the gemma3 family; a file without a window has none, and one RoPE base."""

    has_qk_norm: ClassVar[bool] = True
    n_layer_27b: ClassVar[int] = 62

    def _read(self, keys: Keys) -> None:
        n_swa, n_layer = keys.size("attention.sliding_window", 0, least=0), self.hparams.n_layer
        self.window = Window(n_swa, SwaType.STANDARD) if n_swa else NO_WINDOW
        self.is_swa = windowed_layers(keys, n_layer, 6) if n_swa else (False,) * n_layer
        self.rope_swa = WindowedRope.read(keys, 10000.0, 1.0)  # positions are not stretched there
        self.cap_scores, self.cap_logits = 0.0, keys.positive("final_logit_softcapping", 0.0)

    def _take_output(self, weights: Weights) -> Tensor:
        return blocks.take_output(weights, self.hparams)
