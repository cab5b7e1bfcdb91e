"""LFM2: most layers mix by a short convolution between two gates, the others attend; a gated feed-forward in each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from pykv.cells import NO_WINDOW, SwaType, Window
from pykv.ggml import Tensor, ops
from pykv.memory import LayerSpec, MemorySpec, StateSpec
from pykv.models import blocks, short_conv
from pykv.models.graph_builder import GraphBuilder
from pykv.models.hparams import refuse_tensors
from pykv.models.keys import Keys
from pykv.models.mixed_decoder import MixedDecoder, MixedLayer
from pykv.models.rope import ContextRope
from pykv.models.self_attention import SelfAttention
from pykv.models.weights import LayerWeights


@dataclass(frozen=True)
class GatedConv:
    """Weights of one layer's convolution, with what it is given and what is done with the result."""

    w_in: Tensor
    kernel: Tensor
    w_out: Tensor

    @classmethod
    def take(cls, w: LayerWeights, n_embd: int, n_conv: int) -> Self:
        """Take the weights of a layer."""
        return cls(
            w_in=w.need("shortconv.in_proj.weight", n_embd, 3 * n_embd),
            kernel=w.need_f32("shortconv.conv.weight", n_conv, n_embd),
            w_out=w.need("shortconv.out_proj.weight", n_embd, n_embd),
        )

    def mix(self, b: GraphBuilder, il: int, x: Tensor, eps: float) -> Tensor:
        """Return what the mixer makes of `x` [n_embd, n_tokens]; the inputs of the convolution move on."""
        n, n_tokens, n_seqs = x.ne[0], b.states.n_seq_tokens, b.states.n_seqs
        parts = b.linear(ops.reshape(b.arena, x, n, n_tokens, n_seqs), self.w_in)
        before, behind, x = (short_conv.channels(b, parts, n, i * n) for i in range(3))
        line = short_conv.convolve(b, il, ops.mul(b.arena, before, x), self.kernel)
        out = b.linear(ops.mul(b.arena, behind, line), self.w_out)
        return ops.reshape(b.arena, out, n, n_tokens * n_seqs)


class Lfm2(MixedDecoder):
    """A decoder of the LFM2 family."""

    output_norm_name = "token_embd_norm"

    def _read(self, keys: Keys) -> None:
        refuse_tensors(keys, "dense_2.weight", "dense_2.bias")
        self.n_conv = keys.size("shortconv.l_cache", least=2)
        n_swa = keys.size("attention.sliding_window", 0, least=0)
        self.window = Window(n_swa, SwaType.STANDARD) if n_swa else NO_WINDOW

    def _take_layer(self, il: int, w: LayerWeights) -> MixedLayer:
        hp, n = self.hparams, self.hparams.n_embd
        attends, scale = hp.n_head_kv_by_layer[il] > 0, float(hp.n_embd_head_v) ** -0.5
        return MixedLayer(
            norm=w.need("attn_norm.weight", n),
            mixer=SelfAttention.take(w, hp, il, scale, has_norms=True)
            if attends
            else GatedConv.take(w, n, self.n_conv),
            ffn_norm=w.need("ffn_norm.weight", n),
            ffn=partial(blocks.silu_ffn, ffn=blocks.GatedFFN.take(w, n, hp.n_ff_by_layer[il])),
        )

    def _layer_spec(self, il: int, rope: ContextRope) -> LayerSpec:
        hp, n_head_kv = self.hparams, self.hparams.n_head_kv_by_layer[il]
        if not n_head_kv:
            return LayerSpec.recurrent(StateSpec((self.n_conv - 1) * hp.n_embd))
        params, is_swa = rope.params(hp.n_rot, "neox"), self.window is not NO_WINDOW
        return LayerSpec(n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v, params, is_swa=is_swa)

    def memory_spec(self, rope: ContextRope) -> MemorySpec:
        """Return what the memory must know, for a context with these rotary settings."""
        return replace(super().memory_spec(rope), window=self.window)
