"""Options that several commands share, as annotated types."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

KV_TYPES = ("f16", "q8_0", "q4_0")
"""What `inspect` compares: the usual choices for the cache, from exact to small."""


class FlashAttention(StrEnum):
    """How attention is computed."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


TypeK = Annotated[str, typer.Option("--type-k", help="How keys are stored: f32, f16, bf16, q8_0, q5_1, q4_0 ...")]
TypeV = Annotated[str, typer.Option("--type-v", help="How values are stored; block types need flash attention.")]
FlashAttn = Annotated[FlashAttention, typer.Option("--flash-attn", help="Fused attention, or plain.")]
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="CPU threads; else as many as fit.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
