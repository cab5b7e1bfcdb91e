"""``pykv state``: saved states on disk, looked at, converted and compared. None of it needs a model."""

from __future__ import annotations

import typer

from pykv.cli import state_convert, state_diff, state_inspect
from pykv.cli.failure import FriendlyGroup

EXAMPLE = state_inspect.EXAMPLE

app = typer.Typer(
    cls=FriendlyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look at saved states, convert and compare them; none of it needs a model.",
    epilog=f"Example: {EXAMPLE}",
)

for _name, _module in (("inspect", state_inspect), ("convert", state_convert), ("diff", state_diff)):
    app.command(_name, epilog=f"Example: {_module.EXAMPLE}")(_module.command)
