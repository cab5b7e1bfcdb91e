"""A decoder whose layers attend, keep a state, or do both: a norm and a mixer in each, mostly a feed-forward too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pykv.ggml import Tensor
from pykv.memory import LayerSpec, MemorySpec
from pykv.models import blocks
from pykv.models.architecture import Architecture
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.keys import Keys
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights, Weights

FeedForward = Callable[[GraphBuilder, Tensor], Tensor]
"""What is done to each token on its own, [n_embd, n_tokens] in and out."""


class Mixer(Protocol):
    """What brings tokens together."""

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return what the mixer makes of `x` [n_embd, n_tokens]; what layer `il` remembers is written by it."""
        ...


@dataclass(frozen=True)
class MixedLayer:
    """Weights of one layer; without a feed-forward it ends with its mixer."""

    norm: Tensor
    mixer: Mixer
    ffn_norm: Tensor | None = None
    ffn: FeedForward | None = None


class MixedDecoder(Architecture, ABC):
    """What families with states have in common."""

    output_norm_name: ClassVar[str] = "output_norm"

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        hp, place = hparams, weights.placement
        self.hparams = hparams
        self._read(keys)
        self.tok_embd = blocks.take_embeddings(weights, hp)
        self.output_norm = weights.need(f"{self.output_norm_name}.weight", (hp.n_embd,), place.output)
        self.output = blocks.take_output(weights, hp)
        self.layers = tuple(self._take_layer(il, weights.layer(il)) for il in range(hp.n_layer))

    @abstractmethod
    def _read(self, keys: Keys) -> None:
        """Read what the family has beside `hparams`."""

    @abstractmethod
    def _take_layer(self, il: int, w: LayerWeights) -> MixedLayer:
        """Take the weights of a layer."""

    @abstractmethod
    def _layer_spec(self, il: int, rope: ContextRope) -> LayerSpec:
        """Return what a layer remembers."""

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        return MemorySpec(tuple(self._layer_spec(il, rope) for il in range(self.hparams.n_layer)))

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp, eps = self.hparams, self.hparams.norm_rms_eps
        x = b.embed(self.tok_embd)
        for il, layer in enumerate(self.layers):
            h = layer.mixer.mix(b, il, b.rms_norm(x, layer.norm, eps), eps)
            if il == hp.n_layer - 1:
                if b.shape.n_outputs == 0:
                    return None  # later tokens only need what has been stored
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(h, x)
            if layer.ffn is not None and layer.ffn_norm is not None:
                x = b.add(layer.ffn(b, b.rms_norm(x, layer.ffn_norm, eps)), x)
        return b.linear(b.rms_norm(x, self.output_norm, eps), self.output)
