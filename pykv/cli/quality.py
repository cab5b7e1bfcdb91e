"""``pykv quality``: what moved tokens cost in quality, and what they save in time."""

from __future__ import annotations

import typer

from pykv.cli import quality_chunk, quality_shift
from pykv.cli.failure import FriendlyGroup

EXAMPLE = quality_shift.EXAMPLE

app = typer.Typer(
    cls=FriendlyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure what moved tokens cost in quality, and what they save in time.",
    epilog=f"Example: {EXAMPLE}",
)

for _name, _module in (("shift", quality_shift), ("chunk", quality_chunk)):
    app.command(_name, epilog=f"Example: {_module.EXAMPLE}")(_module.command)
