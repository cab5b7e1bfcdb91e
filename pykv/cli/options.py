"""Options that several commands share, as annotated types."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Attention(StrEnum):
    """Spellings of the context parameter `attention`."""

    AUTO = "auto"
    FUSED = "fused"
    FLASH = "flash"
    MATMUL = "matmul"


Threads = Annotated[
    int | None, typer.Option("--threads", "-t", metavar="N", min=1, help="CPU threads; else one a core.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
