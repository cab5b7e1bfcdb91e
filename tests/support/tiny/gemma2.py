"""Gemma 2: windows on every other layer, norms before and after, scores and logits softly capped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, around


@dataclass(frozen=True, kw_only=True)
class Gemma2(TinyTransformer):
    """The embedding is scaled by sqrt(n_embd), so it starts small; the caps are low enough to bite."""

    arch: ClassVar[str] = "gemma2"
    n_swa: int = 32
    cap_scores: float = 8.0
    cap_logits: float = 4.0

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            **self.heads(),
            Keys.LLM.ATTN_LOGIT_SOFTCAPPING: self.cap_scores,
            Keys.LLM.FINAL_LOGIT_SOFTCAPPING: self.cap_logits,
            Keys.Attention.SLIDING_WINDOW: self.n_swa,
        }

    def tensors(self) -> Shapes:
        d = self.n_embd
        names = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"
        block = blocks.norms(d, *names) | blocks.attention(self) | blocks.gated_ffn(d, self.n_ff)
        return blocks.ends(self) | blocks.layers([block] * self.n_layer)

    def rules(self) -> Rules:
        return (("token_embd.weight", around(0.0, self.n_embd**-0.5)),)


MODELS = {
    "gemma2-4l-w32": Gemma2(seed=101),
    "gemma2-3l-wide-w16": Gemma2(seed=102, n_layer=3, n_head=3, n_head_kv=1, head_dim=64, n_swa=16, n_embd=96),
    "gemma2-6l-w64-caps": Gemma2(seed=103, n_layer=6, n_swa=64, cap_scores=3.0, cap_logits=2.0),
    "gemma2-4l-w32-f16": Gemma2(seed=101, matrices="f16"),
}
