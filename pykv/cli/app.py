"""The command line: one command a file, put together here. Nothing heavy is loaded before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pykv import __version__
from pykv.cli import demo, devices, inspect, parity, plan, pull, quality, replay, rpc_server, run, state
from pykv.cli.failure import FriendlyGroup

app = typer.Typer(
    name="pykv",
    cls=FriendlyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pykv {__version__}")
        raise typer.Exit


@app.callback(epilog="Start with: pykv demo")
def pykv(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Run GGUF models on a KV memory that Python can see and edit."""


for _name, _module in (
    ("pull", pull),
    ("devices", devices),
    ("inspect", inspect),
    ("plan", plan),
    ("parity", parity),
    ("run", run),
    ("demo", demo),
    ("replay", replay),
    ("rpc-server", rpc_server),
):
    app.command(_name, epilog=f"Example: {_module.EXAMPLE}")(_module.command)

app.add_typer(state.app, name="state")
app.add_typer(quality.app, name="quality")
