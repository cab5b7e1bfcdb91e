"""gpt-oss: sinks in the softmax, biases everywhere, windows on every other layer, experts in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer


@dataclass(frozen=True, kw_only=True)
class GptOss(TinyTransformer):
    """Published files hold the experts as mxfp4; here they are like all matrices.

    yarn_factor : stretch of RoPE; 1.0 = none. Published files have 32.
    """

    arch: ClassVar[str] = "gpt-oss"
    n_swa: int = 32
    n_expert: int = 4
    n_expert_used: int = 2
    n_ff: int = 48
    rope_base: float = 150000.0
    yarn_factor: float = 1.0

    @property
    def routing(self) -> tuple[int, int]:
        return self.n_expert, self.n_expert_used

    def hparams(self) -> Hparams:
        found = {
            **self.basics(),
            **self.heads(),
            **self.rope(),
            Keys.Attention.SLIDING_WINDOW: self.n_swa,
            Keys.LLM.EXPERT_COUNT: self.n_expert,
            Keys.LLM.EXPERT_USED_COUNT: self.n_expert_used,
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: self.n_ff,
        }
        if self.yarn_factor != 1.0:
            found |= {Keys.Rope.SCALING_TYPE: "yarn", Keys.Rope.SCALING_FACTOR: self.yarn_factor}
            found[Keys.Rope.SCALING_ORIG_CTX_LEN] = 128
        return found

    def tensors(self) -> Shapes:
        d, n, f = self.n_embd, self.n_expert, self.n_ff
        block = blocks.norms(d, "attn_norm", "post_attention_norm")
        block |= blocks.attention(self) | blocks.qkv_biases(self) | blocks.experts(d, f, n)
        block |= {"attn_output.bias": (d,), "attn_sinks.weight": (self.n_head,), "ffn_gate_inp.bias": (n,)}
        block |= {"ffn_gate_exps.bias": (n, f), "ffn_up_exps.bias": (n, f), "ffn_down_exps.bias": (n, d)}
        return blocks.ends(self, is_tied=False) | blocks.layers([block] * self.n_layer)


MODELS = {
    "gpt-oss-4l-w32": GptOss(seed=151),
    "gpt-oss-3l-wide-w16-8experts": GptOss(
        seed=152,
        n_layer=3,
        n_embd=96,
        n_head=3,
        n_head_kv=1,
        head_dim=64,
        n_swa=16,
        n_expert=8,
        n_expert_used=3,
        n_ff=32,
    ),
    "gpt-oss-2l-w64-yarn": GptOss(seed=153, n_layer=2, n_swa=64, yarn_factor=8.0),
    "gpt-oss-4l-w32-f16": GptOss(seed=151, matrices="f16"),
}
