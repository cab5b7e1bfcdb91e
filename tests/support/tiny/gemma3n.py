"""Gemma 3n: four copies of the residual stream (altup), a low-rank bypass (laurel), an embedding per layer.

The last layers have no K and V of their own and read those of an earlier layer. llama.cpp fixes what no key
changes: layers from 20 on reuse, the first 10 have sparse activations, four streams, rank 64, 256 per-layer
dims, logits capped at 30. So these files cannot be smaller than 21 layers, and they are of 4 to 6 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, around, mixing

N_STREAM, LAUREL_RANK, N_EMBD_PER_LAYER, N_LAYER_WITH_KV, N_LAYER_SPARSE = 4, 64, 256, 20, 10


@dataclass(frozen=True, kw_only=True)
class Gemma3n(TinyTransformer):
    """`pattern` n: layers n - 1, 2n - 1, ... see everything; 5 is the default of llama.cpp."""

    arch: ClassVar[str] = "gemma3n"
    n_layer: int = 22
    n_embd: int = 32
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 64
    n_vocab: int = 260
    n_swa: int = 32
    pattern: int = 5
    rope_base: float = 1e6
    cap_logits: float = 30.0

    @property
    def windowed(self) -> list[bool]:
        """Whether each layer has a window."""
        return [(il + 1) % self.pattern != 0 for il in range(self.n_layer)]

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            **self.heads(),
            Keys.Rope.FREQ_BASE: self.rope_base,
            Keys.Attention.SLIDING_WINDOW: self.n_swa,
            Keys.Attention.SLIDING_WINDOW_PATTERN: self.windowed,
            Keys.Attention.SHARED_KV_LAYERS: self.n_layer - N_LAYER_WITH_KV,
            Keys.LLM.FINAL_LOGIT_SOFTCAPPING: self.cap_logits,
            Keys.LLM.ALTUP_ACTIVE_IDX: 0,
            Keys.LLM.ALTUP_NUM_INPUTS: N_STREAM,
            Keys.LLM.EMBD_LENGTH_PER_LAYER_INP: N_EMBD_PER_LAYER,
            Keys.LLM.ACTIVATION_SPARSITY_SCALE: [1.6448533535003662] * N_LAYER_SPARSE
            + [0.0] * (self.n_layer - N_LAYER_SPARSE),
        }

    def tensors(self) -> Shapes:
        d, per_layer = self.n_embd, N_EMBD_PER_LAYER * self.n_layer
        return (
            blocks.ends(self)
            | {
                "altup_proj.weight": (N_STREAM - 1, d, d),
                "altup_unembd_proj.weight": (N_STREAM - 1, d, d),
                "per_layer_token_embd.weight": (self.n_vocab, per_layer),
                "per_layer_model_proj.weight": (per_layer, d),
                "per_layer_proj_norm.weight": (N_EMBD_PER_LAYER,),
            }
            | blocks.layers([self._block()] * self.n_layer)
        )

    def _block(self) -> Shapes:
        d = self.n_embd
        names = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"
        shapes = blocks.norms(d, *names, "laurel_post_norm", "altup_router_norm", "post_norm")
        shapes |= blocks.attention(self) | blocks.qk_norms(self) | blocks.gated_ffn(d, self.n_ff)
        return shapes | {
            "laurel_l.weight": (LAUREL_RANK, d),
            "laurel_r.weight": (d, LAUREL_RANK),
            "inp_gate.weight": (N_EMBD_PER_LAYER, d),
            "proj.weight": (d, N_EMBD_PER_LAYER),
            "altup_correct_coef.weight": (N_STREAM, N_STREAM),
            "altup_correct_scale.weight": (d,),
            "altup_predict_coef.weight": (N_STREAM * N_STREAM, N_STREAM),
            "altup_router.weight": (N_STREAM, d),
        }

    def rules(self) -> Rules:
        return (
            # embeddings are scaled by the root of their width; scores are not divided by that of the head
            ("token_embd.weight", around(0.0, self.n_embd**-0.5)),
            ("per_layer_token_embd.weight", around(0.0, N_EMBD_PER_LAYER**-0.5)),
            ("*attn_[qk]_norm.weight", around(0.7)),
            # so many layers amplify rounding, unless each adds little
            ("*post_*norm.weight", around(0.3)),
            ("*altup_correct_scale.weight", around(1.0)),
            # the router's input is divided by n_embd, and tanh of what it gives mixes the streams
            ("*altup_router.weight", mixing(self.n_embd**0.5)),
            ("*altup_*_coef.weight", mixing(0.2)),
        )


MODELS = {
    "gemma3n-22l-w32": Gemma3n(seed=201, matrices="f16"),
    "gemma3n-25l-wide-w16": Gemma3n(seed=202, n_layer=25, n_head=3, n_head_kv=3, head_dim=64, n_swa=16, matrices="f16"),
    "gemma3n-22l-w32-f32": Gemma3n(seed=201),
}
