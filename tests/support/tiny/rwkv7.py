"""RWKV 7: per head a matrix that decays, forgets along one direction and takes in one outer product per token.

Each layer also sees the token before (token shift), so its state has two parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, around, evenly, mixing


@dataclass(frozen=True, kw_only=True)
class Rwkv7(TinyTransformer):
    """Heads of `head_dim`, which ggml wants to be a multiple of 64: its widest vectors are this wide.

    The ranks are those of the small matrices behind decay, learning rate, value mix and gate.
    """

    arch: ClassVar[str] = "rwkv7"
    n_embd: int = 128
    head_dim: int = 64
    decay_rank: int = 16
    rate_rank: int = 8
    value_rank: int = 12
    gate_rank: int = 20
    norm_eps: float = 1e-5

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            Keys.Attention.HEAD_COUNT: 0,
            Keys.Attention.LAYERNORM_EPS: self.norm_eps,
            Keys.WKV.HEAD_SIZE: self.head_dim,
            Keys.Attention.DECAY_LORA_RANK: self.decay_rank,
            Keys.Attention.ICLR_LORA_RANK: self.rate_rank,
            Keys.Attention.VALUE_RESIDUAL_MIX_LORA_RANK: self.value_rank,
            Keys.Attention.GATE_LORA_RANK: self.gate_rank,
        }

    def tensors(self) -> Shapes:
        norm = blocks.norms(self.n_embd, "token_embd_norm", has_bias=True)
        kinds = (self._time_mix(il) | self._channel_mix() for il in range(self.n_layer))
        return blocks.ends(self, is_tied=False, has_bias=True) | norm | blocks.layers(kinds)

    def _time_mix(self, il: int) -> Shapes:
        d = self.n_embd
        shapes = blocks.norms(d, "attn_norm", "attn_norm_2", "time_mix_ln", has_bias=True)
        # layer 0 has the value mix too, of another rank, and does not use it
        value_rank = self.value_rank if il else self.rate_rank
        for letter, rank in (("w", self.decay_rank), ("a", self.rate_rank), ("v", value_rank)):
            shapes |= {f"time_mix_{letter}0.weight": (d,), f"time_mix_{letter}1.weight": (rank, d)}
            shapes |= {f"time_mix_{letter}2.weight": (d, rank)}
        shapes |= {"time_mix_g1.weight": (self.gate_rank, d), "time_mix_g2.weight": (d, self.gate_rank)}
        shapes |= {f"time_mix_{name}.weight": (d,) for name in ("k_k", "k_a", "r_k")}
        shapes |= {f"time_mix_{name}.weight": (d, d) for name in ("key", "value", "receptance", "output")}
        return shapes | {"time_mix_lerp_fused.weight": (6, 1, 1, d)}

    def _channel_mix(self) -> Shapes:
        d, f = self.n_embd, self.n_ff
        return {
            "channel_mix_lerp_k.weight": (1, 1, d),
            "channel_mix_key.weight": (f, d),
            "channel_mix_value.weight": (d, f),
        }

    def rules(self) -> Rules:
        return (
            ("*lerp_*", evenly(0.0, 1.0)),
            # decay is exp(-0.61 sigmoid(w0 + ...)): from half a token to a hundred tokens
            ("*time_mix_w0.weight", evenly(-5.0, 1.0)),
            ("*time_mix_[av]0.weight", around(0.0, 0.5)),
            ("*time_mix_[wav]2.weight", mixing(0.3)),
            ("*time_mix_g2.weight", mixing(2.0)),
            ("*time_mix_k_[ka].weight", around(1.0)),
            ("*time_mix_r_k.weight", around(0.0, 0.1)),
            ("*time_mix_ln.weight", around(1.0)),
        )


MODELS = {
    "rwkv7-3l": Rwkv7(seed=181, n_layer=3),
    "rwkv7-2l-wide-128": Rwkv7(seed=182, n_layer=2, n_embd=128, head_dim=128, n_ff=160),
    "rwkv7-2l-3heads": Rwkv7(seed=183, n_layer=2, n_embd=192, n_ff=32, decay_rank=8, gate_rank=8),
    "rwkv7-3l-f16": Rwkv7(seed=181, n_layer=3, matrices="f16"),
}
