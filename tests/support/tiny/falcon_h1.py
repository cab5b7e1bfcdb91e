"""Falcon H1: in each layer attention and a Mamba 2 mixer side by side on the same input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.mamba2 import HEAD_SCAN_RULES
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules


@dataclass(frozen=True, kw_only=True)
class FalconH1(TinyTransformer):
    """`ffn_norm` has no .weight in its name: llama.cpp asks for it so."""

    arch: ClassVar[str] = "falcon-h1"
    d_conv: int = 4
    d_state: int = 16
    d_inner: int = 96
    n_scan_head: int = 3
    n_group: int = 1
    has_scan_norm: bool = False

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            **self.heads(),
            **self.rope(),
            Keys.SSM.CONV_KERNEL: self.d_conv,
            Keys.SSM.INNER_SIZE: self.d_inner,
            Keys.SSM.STATE_SIZE: self.d_state,
            Keys.SSM.TIME_STEP_RANK: self.n_scan_head,
            Keys.SSM.GROUP_COUNT: self.n_group,
        }

    def tensors(self) -> Shapes:
        d = self.n_embd
        block = blocks.norms(d, "attn_norm") | blocks.attention(self) | blocks.gated_ffn(d, self.n_ff)
        block |= blocks.scan_per_head(self, has_norm=self.has_scan_norm) | {"ffn_norm": (d,)}
        return blocks.ends(self, is_tied=False) | blocks.layers([block] * self.n_layer)

    def rules(self) -> Rules:
        return HEAD_SCAN_RULES


MODELS = {
    "falcon-h1-3l": FalconH1(seed=161, n_layer=3),
    "falcon-h1-2l-wide-2groups": FalconH1(
        seed=162,
        n_layer=2,
        n_embd=96,
        n_head=3,
        n_head_kv=1,
        head_dim=64,
        d_inner=128,
        n_scan_head=4,
        n_group=2,
        has_scan_norm=True,
    ),
    "falcon-h1-3l-f16": FalconH1(seed=161, n_layer=3, matrices="f16"),
}
