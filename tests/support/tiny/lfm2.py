"""LFM2: most layers mix with a short convolution between two gates, the others with attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, around, mixing


@dataclass(frozen=True, kw_only=True)
class Lfm2(TinyTransformer):
    """Heads are `n_embd / n_head` wide. The last norm is called `token_embd_norm`, as in published files.

    attention_layers : the layers with attention; llama.cpp sees them by their number of KV heads, which is a list.
    n_swa : window of the layers with attention, 0 = none: attention with a window and recurrent layers in one model.
    """

    arch: ClassVar[str] = "lfm2"
    head_dim: int = 16
    attention_layers: tuple[int, ...] = (2,)
    l_cache: int = 3
    n_swa: int = 0
    rope_base: float = 1e6

    def hparams(self) -> Hparams:
        found = {
            **self.basics(),
            Keys.Attention.HEAD_COUNT: self.n_head,
            Keys.Attention.HEAD_COUNT_KV: [
                self.n_head_kv if il in self.attention_layers else 0 for il in range(self.n_layer)
            ],
            Keys.Attention.LAYERNORM_RMS_EPS: self.rms_eps,
            Keys.Rope.FREQ_BASE: self.rope_base,
            Keys.ShortConv.L_CACHE: self.l_cache,
        }
        return found | ({Keys.Attention.SLIDING_WINDOW: self.n_swa} if self.n_swa else {})

    def tensors(self) -> Shapes:
        d = self.n_embd
        ffn = blocks.norms(d, "attn_norm", "ffn_norm") | blocks.gated_ffn(d, self.n_ff)
        attention = ffn | blocks.attention(self) | blocks.qk_norms(self)
        convolution = ffn | {
            "shortconv.conv.weight": (d, self.l_cache),
            "shortconv.in_proj.weight": (3 * d, d),
            "shortconv.out_proj.weight": (d, d),
        }
        kinds = (attention if il in self.attention_layers else convolution for il in range(self.n_layer))
        return {
            "token_embd.weight": (self.n_vocab, d),
            "token_embd_norm.weight": (d,),
            **blocks.layers(kinds),
        }

    def rules(self) -> Rules:
        # q and k are of unit size, so their norms make scores sharp
        return ("*attn_[qk]_norm.weight", around(1.7)), ("*shortconv.conv.weight", mixing(1.5))


MODELS = {
    "lfm2-4l": Lfm2(seed=171),
    "lfm2-6l-wide-conv4": Lfm2(
        seed=172, n_layer=6, n_embd=96, n_head=3, n_head_kv=1, head_dim=32, attention_layers=(1, 4), l_cache=4
    ),
    "lfm2-4l-w16": Lfm2(seed=173, attention_layers=(1, 3), n_swa=16),
    "lfm2-4l-f16": Lfm2(seed=171, matrices="f16"),
}
