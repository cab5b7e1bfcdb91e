"""Mamba 2: the scan in heads that share a decay, B and C in groups, and a norm over each group; no attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, mixing


@dataclass(frozen=True, kw_only=True)
class Mamba2(TinyTransformer):
    """`n_scan_head` heads of `d_inner / n_scan_head` channels."""

    arch: ClassVar[str] = "mamba2"
    d_conv: int = 4
    d_state: int = 16
    d_inner: int = 128
    n_scan_head: int = 4
    n_group: int = 1
    is_tied: bool = True

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            Keys.LLM.FEED_FORWARD_LENGTH: 0,
            Keys.Attention.HEAD_COUNT: 0,
            Keys.Attention.LAYERNORM_RMS_EPS: self.rms_eps,
            Keys.SSM.CONV_KERNEL: self.d_conv,
            Keys.SSM.INNER_SIZE: self.d_inner,
            Keys.SSM.STATE_SIZE: self.d_state,
            Keys.SSM.TIME_STEP_RANK: self.n_scan_head,
            Keys.SSM.GROUP_COUNT: self.n_group,
        }

    def tensors(self) -> Shapes:
        block = blocks.norms(self.n_embd, "attn_norm")
        block |= blocks.scan_per_head(self, has_norm=True)
        return blocks.ends(self, is_tied=self.is_tied) | blocks.layers([block] * self.n_layer)

    def rules(self) -> Rules:
        return HEAD_SCAN_RULES


HEAD_SCAN_RULES: Rules = (("*ssm_conv1d.weight", mixing(2.0)),)
"""Channels, B and C large enough for the state to weigh as much as the token itself."""

MODELS = {
    "mamba2-4l": Mamba2(seed=131),
    "mamba2-2l-8heads-2groups": Mamba2(
        seed=132, n_layer=2, n_embd=96, d_inner=192, n_scan_head=8, n_group=2, d_state=8
    ),
    "mamba2-3l-conv3": Mamba2(seed=133, n_layer=3, n_scan_head=2, d_conv=3, d_state=32, is_tied=False),
    "mamba2-4l-f16": Mamba2(seed=131, matrices="f16"),
}
