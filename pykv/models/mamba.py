"""Mamba: no attention and no feed-forward; each layer is a norm and a mixer that scans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pykv.ggml import Tensor
from pykv.memory import LayerSpec, MemorySpec, StateSpec
from pykv.models import blocks
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import HParams
from pykv.models.keys import Keys
from pykv.models.mamba_mixer import MambaMixer, MambaSizes, Norms
from pykv.models.rope import ContextRope
from pykv.models.weights import LayerWeights, Weights


class Mixer(Protocol):
    """What stands between the norm and the residual stream."""

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return what the mixer makes of `x` [n_embd, n_tokens]; the states move on."""
        ...


@dataclass(frozen=True)
class MambaLayer:
    """Weights of one layer."""

    norm: Tensor
    mixer: Mixer


class Mamba:
    """A decoder of the Mamba family."""

    state: StateSpec

    def __init__(self, hparams: HParams, weights: Weights, keys: Keys) -> None:
        hp, place = hparams, weights.placement
        self.hparams = hparams
        self._read(keys)
        self.tok_embd = weights.need("token_embd.weight", (hp.n_embd, hp.n_vocab), place.input)
        self.output_norm = weights.need("output_norm.weight", (hp.n_embd,), place.output)
        self.output = blocks.take_output(weights, hp)
        self.layers = tuple(self._take_layer(weights.layer(il)) for il in range(hp.n_layer))

    def _read(self, keys: Keys) -> None:
        self.sizes = MambaSizes.read(keys)
        self.norms = Norms() if keys.flag("ssm.dt_b_c_rms", False) else None
        self.state = self.sizes.state

    def _take_layer(self, w: LayerWeights) -> MambaLayer:
        n = self.hparams.n_embd
        return MambaLayer(w.need("attn_norm.weight", n), MambaMixer.take(w, n, self.sizes, self.norms))

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know; there is nothing rotary."""
        return MemorySpec.uniform(self.hparams.n_layer, LayerSpec.recurrent(self.state))

    def build(self, b: GraphBuilder) -> Tensor | None:
        """Write down the graph; returns logits [n_vocab, n_outputs], or None if no outputs are wanted."""
        hp = self.hparams
        x = b.embed(self.tok_embd)
        for il, layer in enumerate(self.layers):
            h = layer.mixer.mix(b, il, b.rms_norm(x, layer.norm, hp.norm_rms_eps), hp.norm_rms_eps)
            if il == hp.n_layer - 1:
                if b.shape.n_outputs == 0:
                    return None  # later tokens only need the states
                h, x = b.select_outputs(h), b.select_outputs(x)
            x = b.add(h, x)
        return b.linear(b.rms_norm(x, self.output_norm, hp.norm_rms_eps), self.output)
