"""Mamba: a convolution over a few tokens, then a selective scan with one state vector per channel; no attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gguf import Keys
from support.tiny import blocks
from support.tiny.model import Hparams, Shapes, TinyTransformer
from support.tiny.values import Rules, mixing


@dataclass(frozen=True, kw_only=True)
class Mamba(TinyTransformer):
    """llama.cpp wants twice as many channels as the embedding has.

    has_rms : B, C and the time step are normed, without weights, as FalconMamba does.
    """

    arch: ClassVar[str] = "mamba"
    d_conv: int = 4
    d_state: int = 16
    dt_rank: int = 8
    has_rms: bool = False
    is_tied: bool = True

    @property
    def d_inner(self) -> int:
        """Channels of convolution and scan."""
        return 2 * self.n_embd

    def hparams(self) -> Hparams:
        return {
            **self.basics(),
            Keys.LLM.FEED_FORWARD_LENGTH: 0,
            Keys.Attention.HEAD_COUNT: 0,
            Keys.Attention.LAYERNORM_RMS_EPS: self.rms_eps,
            Keys.SSM.CONV_KERNEL: self.d_conv,
            Keys.SSM.INNER_SIZE: self.d_inner,
            Keys.SSM.STATE_SIZE: self.d_state,
            Keys.SSM.TIME_STEP_RANK: self.dt_rank,
            Keys.SSM.DT_B_C_RMS: self.has_rms,
        }

    def tensors(self) -> Shapes:
        block = blocks.norms(self.n_embd, "attn_norm")
        block |= blocks.scan_per_channel(self.n_embd, self.d_conv, self.d_state, self.dt_rank)
        return blocks.ends(self, is_tied=self.is_tied) | blocks.layers([block] * self.n_layer)

    def rules(self) -> Rules:
        return SCAN_RULES


SCAN_RULES: Rules = (
    ("*ssm_x.weight", mixing(3.0)),
    ("*ssm_dt.weight", mixing(0.3)),
    ("*ssm_conv1d.weight", mixing(1.5)),
)
"""B and C large enough for the state to weigh as much as the token itself; time steps stay near their biases."""

MODELS = {
    "mamba-4l": Mamba(seed=121),
    "mamba-2l-wide-conv3": Mamba(seed=122, n_layer=2, n_embd=96, d_conv=3, d_state=8, dt_rank=6, is_tied=False),
    "mamba-3l-rms": Mamba(seed=123, n_layer=3, has_rms=True),
    "mamba-4l-f16": Mamba(seed=121, matrices="f16"),
}
