"""``pykv parity``: whether devices compute the same, layer by layer, and which operation is the first that does not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import options
from pykv.cli.catalog import model_path
from pykv.cli.console import finite, results, slow_bar, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from pykv.parity import ParityReport, SideReport

EXAMPLE = "pykv parity -m smollm2-135m --devices CPU,Vulkan0 --per-layer"


def command(
    *,
    model: Annotated[str, typer.Option("--model", "-m", metavar="FILE", help="GGUF file, or name that pull lists.")],
    devices: options.Devices = None,
    rpc: options.RPC = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Run a recorded trace instead of the usual program.")
    ] = None,
    n_ctx: Annotated[
        int | None, typer.Option("--ctx", metavar="N", min=1, help="Cells; else what the program needs.")
    ] = None,
    n_ubatch: Annotated[
        int | None, typer.Option("--ubatch", metavar="N", min=1, help="Tokens computed at once.")
    ] = None,
    type_k: Annotated[
        str | None, typer.Option("--type-k", metavar="TYPE", help="How keys are stored; else f16.")
    ] = None,
    type_v: Annotated[
        str | None, typer.Option("--type-v", metavar="TYPE", help="How values are stored; else f16.")
    ] = None,
    attention: Annotated[
        options.Attention,
        typer.Option("--attention", metavar="PATH", help="auto (each device's own), fused, flash or matmul."),
    ] = options.Attention.AUTO,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", metavar="X", min=0, help="NMSE that counts as rounding; else by type."),
    ] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Show every layer.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw distances by layer.")] = None,
    n_threads: options.Threads = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write JSON into a file; - writes it to stdout.")
    ] = None,
) -> None:
    """Run the same tokens, verbs and shifts on several devices; the first is what the others are held against.

    Ends with 0 if rounding explains all differences, with 1 if not.
    """
    from pykv.parity import compare

    if plot is not None:
        from pykv.parity import drawing

        drawing.require()
    given: dict[str, Any] = {
        "n_ctx": n_ctx,
        "n_ubatch": n_ubatch,
        "type_k": type_k,
        "type_v": type_v,
        "n_threads": n_threads,
    }
    names = [*options.listed(devices), *(f"rpc://{endpoint}" for endpoint in options.listed(rpc))]
    with slow_bar("comparing") as on_step:
        report = compare(
            model_path(model),
            names,
            trace=trace,
            tolerance=tolerance,
            on_step=on_step,
            attention=attention.value,
            **{name: value for name, value in given.items() if value is not None},
        )
    if plot is not None:
        drawing.draw(report, plot)
    if json is not None:
        _write(report, json)
    if json != "-":
        _show(report, per_layer)
    raise typer.Exit(0 if report.agrees else 1)


def _write(report: ParityReport, target: str) -> None:
    if target == "-":
        write_json(record(report))
        return
    with Path(target).open("w", encoding="utf-8") as stream:
        write_json(record(report), stream)


def record(report: ParityReport) -> dict[str, Any]:
    """Return a report as JSON has it: numbers that are not finite are null, kinds hold a list of layers."""
    return {
        "reference": report.reference,
        "n_steps": report.n_steps,
        "agrees": report.agrees,
        "split": _side(report.split),
        "sides": [_side(side) for side in report.sides],
    }


def _side(side: SideReport) -> dict[str, Any]:
    return {
        "name": side.name,
        "verdict": side.verdict,
        "attention": side.attention,
        "first": None if side.first is None else asdict(side.first),
        "n_rows": side.n_rows,
        "flips": [asdict(flip) for flip in side.flips],
        "mean_kl": finite(side.mean_kl),
        "max_kl": finite(side.max_kl),
        "distances": {
            kind: [
                {
                    "layer": None if kind == "logits" else il,
                    "nmse": finite(one.nmse),
                    "max_abs": finite(one.max_abs),
                    "limit": finite(one.limit),
                }
                for il, one in sorted(layers.items())
            ]
            for kind, layers in side.by_layer.items()
        },
    }


def _show(report: ParityReport, per_layer: bool) -> None:
    from pykv.parity.report import OPS, ORDER

    console = results()
    kinds = [kind for kind in ORDER if kind in report.split.by_layer]
    console.print(f"{report.n_steps} steps, held against {report.reference} ({report.split.attention} attention)")
    console.print(_overview(report, kinds))
    if per_layer:
        for side in report.sides:
            console.print(_layers(side, kinds))
    for side in report.sides:
        if side.first is not None:
            console.print(f"{side.name} leaves {report.reference} first in {side.first}", soft_wrap=True, style="bold")
            console.print(f"  computed by {OPS[side.first.kind]}", soft_wrap=True)
        ties = [flip for flip in side.flips if flip.gap]
        if ties:
            console.print(
                f"{side.name}: {len(ties)} of {side.n_rows} rows have another likeliest token; {report.reference} "
                f"prefers its own by {max(flip.gap for flip in ties):.3g} at most",
                soft_wrap=True,
            )


def _overview(report: ParityReport, kinds: list[str]) -> Table:
    """Return a table with a row for each device: the largest NMSE of each kind, over steps and layers."""
    from rich.table import Table

    table = Table("NMSE", "verdict", *kinds, "logits", "KL", "flips")
    for side in (report.split, *report.sides):
        verdict = "" if side is report.split else side.verdict
        cells = []
        for kind in kinds:
            found = side.worst(kind)
            cells.append("" if found is None else f"{found[1].nmse:.0e}")
        style = "red" if side.verdict == "differs" else None
        table.add_row(
            side.name,
            verdict,
            *cells,
            f"{side.logits.nmse:.0e}" if "logits" in side.by_layer else "",
            f"{side.mean_kl:.0e}",
            f"{len(side.flips)}/{side.n_rows}",
            style=style,
        )
    return table


def _layers(side: SideReport, kinds: list[str]) -> Table:
    """Return a table with a row for each layer; ! = more than rounding."""
    from rich.table import Table

    table = Table("layer", *kinds, title=f"{side.name}: NMSE by layer", title_justify="left")
    layers = sorted({il for kind in kinds for il in side.by_layer.get(kind, {})})
    for il in layers:
        found = (side.by_layer.get(kind, {}).get(il) for kind in kinds)
        table.add_row(
            str(il), *("" if one is None else f"{one.nmse:.1e}{'' if one.is_within else ' !'}" for one in found)
        )
    return table
