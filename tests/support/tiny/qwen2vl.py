"""Qwen2-VL, the text part: RoPE whose pairs of dims turn by time, row or column (M-RoPE), in sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer


@dataclass(frozen=True, kw_only=True)
class Qwen2Vl(TinyTransformer):
    """Heads are `n_embd / n_head` wide; `sections` are pairs by time, row, column and nothing, in all half a head."""

    arch: ClassVar[str] = "qwen2vl"
    n_layer: int = 3
    n_embd: int = 128
    sections: tuple[int, int, int, int] = (4, 6, 6, 0)
    rope_base: float = 1e6

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            Keys.Attention.HEAD_COUNT: self.n_head,
            Keys.Attention.HEAD_COUNT_KV: self.n_head_kv,
            Keys.Attention.LAYERNORM_RMS_EPS: self.rms_eps,
            Keys.Rope.FREQ_BASE: self.rope_base,
            Keys.Rope.DIMENSION_SECTIONS: self.sections,
        }

    def tensors(self) -> Shapes:
        d = self.n_embd
        block = blocks.norms(d, "attn_norm", "ffn_norm") | blocks.attention(self) | blocks.qkv_biases(self)
        block |= blocks.gated_ffn(d, self.n_ff)
        return blocks.ends(self) | blocks.layers([block] * self.n_layer)


MODELS = {
    "qwen2vl-3l": Qwen2Vl(seed=231),
    "qwen2vl-2l-wide": Qwen2Vl(
        seed=232, n_layer=2, n_embd=192, n_head=3, n_head_kv=1, head_dim=64, n_ff=64, sections=(8, 12, 12, 0)
    ),
    "qwen2vl-3l-f16": Qwen2Vl(seed=231, matrices="f16"),
}
