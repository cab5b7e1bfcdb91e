"""Llama 4 (text): windows in chunks, whole layers without RoPE and with a position-dependent temperature, experts.

llama.cpp fixes three numbers that no key changes: chunks of 8192 positions, every fourth layer without RoPE, and a
temperature that starts to rise at position 8191. Chunks and temperature therefore show only in prompts longer than
that; the models are as small as can be so that such a prompt takes seconds. A window of 0 would mean none of the
three, but llama.cpp ends its process in such a model, and in one of fewer than four layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer


@dataclass(frozen=True, kw_only=True)
class Llama4(TinyTransformer):
    """Layers moe_step - 1, 2 moe_step - 1, ... have experts and a shared expert, the others a plain FFN.

    pattern : layers pattern - 1, ... see everything; 4 is the default and is not written then.
    """

    arch: ClassVar[str] = "llama4"
    n_embd: int = 32
    n_head: int = 2
    n_head_kv: int = 1
    head_dim: int = 16
    n_ff: int = 48
    n_ff_exp: int = 32
    n_expert: int = 4
    n_expert_used: int = 1
    moe_step: int = 2
    pattern: int = 4
    rope_base: float = 500000.0
    n_ctx_train: int = 32768

    @property
    def routing(self) -> tuple[int, int]:
        return self.n_expert, self.n_expert_used

    def hparams(self) -> Hparams:
        found = {
            **self.basics(),
            **self.heads(),
            **self.rope(),
            Keys.LLM.EXPERT_COUNT: self.n_expert,
            Keys.LLM.EXPERT_USED_COUNT: self.n_expert_used,
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: self.n_ff_exp,
            Keys.LLM.INTERLEAVE_MOE_LAYER_STEP: self.moe_step,
        }
        if self.pattern != 4:
            found[Keys.Attention.SLIDING_WINDOW_PATTERN] = self.pattern
        return found

    def tensors(self) -> Shapes:
        d = self.n_embd
        both = blocks.norms(d, "attn_norm", "ffn_norm") | blocks.attention(self)
        dense = both | blocks.gated_ffn(d, self.n_ff)
        routed = both | blocks.experts(d, self.n_ff_exp, self.n_expert) | blocks.gated_ffn(d, self.n_ff_exp, "_shexp")
        kinds = (dense if (il + 1) % self.moe_step else routed for il in range(self.n_layer))
        return blocks.ends(self, is_tied=False) | blocks.layers(kinds)


MODELS = {
    "llama4-4l": Llama4(seed=191),
    "llama4-5l-wide-every2": Llama4(
        seed=192, n_layer=5, n_embd=64, n_head=3, head_dim=32, pattern=2, moe_step=1, n_expert=8, n_expert_used=2
    ),
    "llama4-4l-f16": Llama4(seed=191, matrices="f16"),
}
