"""BLOOM: MPT with biases everywhere, a norm after the embedding, and one slope limit for all files."""

from __future__ import annotations

from pykv.ggml import Tensor
from pykv.models import blocks
from pykv.models.blocks import Affine
from pykv.models.graph_builder import GraphBuilder
from pykv.models.keys import Keys
from pykv.models.mpt import Mpt
from pykv.models.weights import Weights


class Bloom(Mpt):
    """A decoder of the BLOOM family."""

    needs_bias = True

    def _take_more(self, weights: Weights, keys: Keys) -> None:
        self.max_bias, self.clamp, self.pos_embd = 8.0, 0.0, None
        ne, device = (self.hparams.n_embd,), weights.placement.input
        self.tok_norm = Affine(
            weights.need("token_embd_norm.weight", ne, device), weights.need("token_embd_norm.bias", ne, device)
        )

    def _embed(self, b: GraphBuilder) -> Tensor:
        return blocks.layer_norm(b, super()._embed(b), self.tok_norm, self.hparams.norm_rms_eps)
