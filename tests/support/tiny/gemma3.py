"""Gemma 3: windows on all layers but every n-th, which has another RoPE base; norms before, after and on q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, around


@dataclass(frozen=True, kw_only=True)
class Gemma3(TinyTransformer):
    """`pattern` n: layers n - 1, 2n - 1, ... see everything; 6 is the default and is not written then.

    n_swa : 0 = no windows at all, and one RoPE base.
    has_layer_list : the pattern is written as a list of bools, one a layer.
    """

    arch: ClassVar[str] = "gemma3"
    n_swa: int = 32
    pattern: int = 6
    has_layer_list: bool = False
    rope_base: float = 1e6
    rope_base_swa: float = 10000.0
    rope_factor: float = 1.0

    @property
    def windowed(self) -> list[bool]:
        """Whether each layer has a window."""
        return [self.n_swa > 0 and (not self.pattern or (il + 1) % self.pattern != 0) for il in range(self.n_layer)]

    def hparams(self) -> Hparams:
        found = {**self.basics(), **self.heads(), Keys.Rope.FREQ_BASE: self.rope_base}
        if self.rope_factor != 1.0:
            found |= {Keys.Rope.SCALING_TYPE: "linear", Keys.Rope.SCALING_FACTOR: self.rope_factor}
        if self.n_swa:
            found |= {Keys.Attention.SLIDING_WINDOW: self.n_swa, Keys.Rope.FREQ_BASE_SWA: self.rope_base_swa}
        if self.has_layer_list:
            found[Keys.Attention.SLIDING_WINDOW_PATTERN] = self.windowed
        elif self.pattern != 6:
            found[Keys.Attention.SLIDING_WINDOW_PATTERN] = self.pattern
        return found

    def tensors(self) -> Shapes:
        d = self.n_embd
        names = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"
        block = blocks.norms(d, *names) | blocks.attention(self) | blocks.qk_norms(self)
        block |= blocks.gated_ffn(d, self.n_ff)
        return blocks.ends(self) | blocks.layers([block] * self.n_layer)

    def rules(self) -> Rules:
        # the embedding is scaled by sqrt(n_embd); q and k are of unit size, so their norms make scores sharp
        return ("token_embd.weight", around(0.0, self.n_embd**-0.5)), ("*attn_[qk]_norm.weight", around(1.7))


MODELS = {
    "gemma3-7l-w32": Gemma3(seed=111, n_layer=7),
    "gemma3-4l-w16-every2": Gemma3(seed=112, n_layer=4, n_swa=16, pattern=2),
    "gemma3-6l-wide-w64-list": Gemma3(
        seed=113, n_layer=6, n_embd=96, n_head=3, n_head_kv=1, head_dim=64, n_swa=64, pattern=3, has_layer_list=True
    ),
    "gemma3-3l-w16-linear": Gemma3(seed=114, n_layer=3, n_swa=16, pattern=3, rope_factor=8.0),
    "gemma3-2l-no-window": Gemma3(seed=115, n_layer=2, n_swa=0),
    "gemma3-4l-w16-every2-f16": Gemma3(seed=112, n_layer=4, n_swa=16, pattern=2, matrices="f16"),
}
