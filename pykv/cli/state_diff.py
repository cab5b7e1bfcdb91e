"""``pykv state diff``: what two saved states do not share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import options
from pykv.cli.console import finite, notes, results, slow_bar, write_json
from pykv.cli.failure import in_options
from pykv.cli.state_convert import parse_rotation

if TYPE_CHECKING:
    from rich.table import Table

    from pykv.runtime.states.comparison import Comparison, TensorApart
    from pykv.runtime.states.matched_cells import Run

EXAMPLE = "pykv state diff before.ggsq after.ggsq"

N_RUNS = 8
"""Runs of positions that are shown of many."""


def command(
    context: typer.Context,
    *,
    first: Annotated[str, typer.Argument(metavar="A", help="A saved state.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    seq_id: Annotated[
        int | None, typer.Option("--seq", metavar="N", help="Compare only this sequence of a session.")
    ] = None,
    rotation: Annotated[
        str | None,
        typer.Option(
            "--rotation", metavar="K,V", help="Widths by which K and V are rotated where a file does not say."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare two saved states, row by row by sequence and position, whatever their form.

    Types, order of cells and rotations may differ. Layers that are the same are summed up; --json lists each.
    Checksums that do not fit are told. Leaves with 0 if both hold the same, 1 if not, 2 if they cannot be
    compared. Needs no model.
    """
    from pykv.runtime.states.compare import compare

    with slow_bar("diff", is_shown=not json) as on_progress:
        found = compare(first, second, seq_id=seq_id, rotation=parse_rotation(rotation), on_progress=on_progress)
    _warn(found.warnings, context)
    if json:
        write_json(_record(first, second, found))
    else:
        _show(found)
    if not found.is_identical:
        raise typer.Exit(1)


def _warn(warnings: list[str], context: typer.Context) -> None:
    from rich.text import Text

    for one in warnings:
        said = in_options(one, context.command.params)
        notes().print(Text.assemble(("pykv: warning: ", "bold yellow"), said), soft_wrap=True)


def _record(first: str, second: str, found: Comparison) -> dict[str, Any]:
    record = asdict(found)
    for kind in ("stored_otherwise", "differences"):
        record[kind] = [one._asdict() for one in getattr(found, kind)]
    for cells, one in zip(record["cells"], found.cells, strict=True):
        del cells["only"]
        cells["only_first"], cells["only_second"] = ([run._asdict() for run in runs] for runs in one.only)
    for tensor in record["tensors"]:
        tensor |= {name: finite(tensor[name]) for name in ("nmse", "max_abs")}
    return {"first": first, "second": second, "is_identical": found.is_identical, **record}


def _show(found: Comparison) -> None:
    from rich.table import Table
    from rich.text import Text

    out = results()
    for title, pairs in (("stored otherwise", found.stored_otherwise), ("differs", found.differences)):
        if pairs:
            table = Table("", "A", "B", title=title, title_justify="left")
            for what, one, other in pairs:
                table.add_row(*map(Text, (what, one, other)))
            out.print(table)
    for line in _lines(found):
        out.print(Text(line), soft_wrap=True)
    if any(one.n_differ for one in found.tensors):
        out.print(_tensors(found))
    verdict = ("identical", "bold green") if found.is_identical else ("different", "bold red")
    out.print(Text.assemble(verdict, _summary(found)), soft_wrap=True)


def _lines(found: Comparison) -> Iterator[str]:
    if found.tokens is not None:
        apart = found.tokens
        yield f"tokens: {apart.n[0]} and {apart.n[1]}, {apart.n_differ} differ, the first at {apart.first}"
    for one in found.cells:
        if not one.is_same:
            yield f"{one.section}: {one.n_both} tokens in both"
        for name, runs in zip("AB", one.only, strict=True):
            if runs:
                yield f"{one.section}: only in {name}: {_runs(runs)}"
        if one.n_ext_differ:
            yield f"{one.section}: {one.n_ext_differ} tokens with another x, y or token noted"


def _runs(runs: list[Run]) -> str:
    told = "; ".join(
        f"{'nobody' if who < 0 else f'sequence {who}'}, {start}..{stop - 1}" for who, start, stop in runs[:N_RUNS]
    )
    return told + (f"; and {len(runs) - N_RUNS} more runs" if len(runs) > N_RUNS else "")


def _tensors(found: Comparison) -> Table:
    """Return a line a layer, with both of its tensors; of neighbours that are the same, one line."""
    from rich.table import Table

    there = {one.kind for one in found.tensors}
    kinds = ("/".join(kind for kind in pair if kind in there) for pair in ("KR", "VS"))
    table = Table("section", "layer", *(f"{kind} {what}".strip() for kind in kinds for what in _COLUMNS))
    by_layer: dict[tuple[str, int], dict[str, TensorApart]] = {}
    for one in found.tensors:
        by_layer.setdefault((one.section, one.layer), {})[one.kind] = one
    for (section, _, texts), group in groupby(by_layer.items(), _alike):
        layers = [layer for (_, layer), _ in group]
        spelt = str(layers[0]) if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"
        table.add_row(section, spelt, *texts)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _alike(entry: tuple[tuple[str, int], dict[str, TensorApart]]) -> tuple[str, int, tuple[str, ...]]:
    """Return what neighbouring layers share that are shown in one line: only those that are the same in both states."""
    (section, layer), tensors = entry
    pair = tensors.get("K") or tensors.get("R"), tensors.get("V") or tensors.get("S")
    differs = any(one.n_differ for one in tensors.values())
    return section, layer if differs else -1, tuple(text for one in pair for text in _tensor(one))


_COLUMNS = ("rows differ", "NMSE", "max abs")


def _tensor(one: TensorApart | None) -> tuple[str, str, str]:
    if one is None:
        return "-", "", ""
    if not one.n_differ:
        return f"0 of {one.n_rows}", "", ""
    return f"{one.n_differ} of {one.n_rows}", f"{one.nmse:.3g}", f"{one.max_abs:.3g}"


def _summary(found: Comparison) -> str:
    n_differ = sum(bool(one.n_differ) for one in found.tensors)
    n_rows = sum(one.n_rows for one in found.tensors)
    of = "" if found.seq_id is None else f" of sequence {found.seq_id}, and nothing else"
    if found.is_identical:
        return f": {len(found.tensors)} tensors, {n_rows} rows compared{of}"
    return f": {n_differ} of {len(found.tensors)} tensors differ, {n_rows} rows compared{of}"
