"""``pykv devices``: what this machine can compute on."""

from __future__ import annotations

from typing import Annotated

import typer

from pykv.cli.console import results, size, write_json

EXAMPLE = "pykv devices --json"


def command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line instead of a table.")] = False,
) -> None:
    """List the devices that ggml can compute on."""
    from rich.table import Table

    from pykv.ggml import devices

    table = Table("name", "kind", "what it is", "free", "memory")
    for device in devices():
        if json:
            write_json(
                {
                    "name": device.name,
                    "kind": device.kind,
                    "description": device.description,
                    "memory_free": device.memory_free,
                    "memory_total": device.memory_total,
                }
            )
        table.add_row(device.name, device.kind, device.description, size(device.memory_free), size(device.memory_total))
    if not json:
        results().print(table)
