"""``pykv replay``: run a recorded trace again, and show the first thing that differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import options
from pykv.cli.catalog import model_path
from pykv.cli.console import notes, results, write_json
from pykv.cli.failure import in_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from pykv.runtime.replay import Report
    from pykv.runtime.replay.side import Cells
    from pykv.runtime.trace.file import TraceFile

EXAMPLE = "pykv replay fault.jsonl --type-k q8_0"


def _changed(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="What the second run does otherwise", **settings)


def command(
    context: typer.Context,
    *,
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A file that ctx.trace(path) wrote.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="FILE", help="What computes, on both sides; else a stand-in."),
    ] = None,
    other_model: Annotated[str | None, _changed("--other-model", metavar="FILE", help="Another GGUF file.")] = None,
    devices: Annotated[str | None, _changed("--device", "-d", metavar="NAME", help="One that devices lists.")] = None,
    n_ctx: Annotated[int | None, _changed("--ctx", "-c", metavar="N", min=1, help="Cells.")] = None,
    n_ubatch: Annotated[int | None, _changed("--ubatch", metavar="N", min=1, help="Tokens computed at once.")] = None,
    type_k: Annotated[str | None, _changed("--type-k", metavar="TYPE", help="How keys are stored.")] = None,
    type_v: Annotated[str | None, _changed("--type-v", metavar="TYPE", help="How values are stored.")] = None,
    kv_unified: Annotated[
        bool | None,
        _changed(
            "--unified/--streams",
            help="One pool of cells, or cells of its own for each sequence; seq_keep removes the same in both.",
        ),
    ] = None,
    flash_attn: Annotated[bool | None, _changed("--flash/--no-flash", help="Flash attention, or plain.")] = None,
    attention: Annotated[
        options.Attention | None, _changed("--attention", metavar="PATH", help="auto, fused, flash or matmul.")
    ] = None,
    reference_moves: Annotated[
        bool | None, _changed("--reference-moves/--own-moves", help="Move positions as llama.cpp does, or not.")
    ] = None,
    swa_full: Annotated[
        bool | None,
        _changed("--swa-full/--window-only", help="Layers with a window keep all, or what it shows."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", metavar="X", min=0, help="NMSE up to which rows are equal; else by the types."),
    ] = None,
    dump: Annotated[bool, typer.Option("--dump", help="Show the cells at the end, or at the difference.")] = False,
    n_threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Run a recorded trace again and find the first difference.

    Two runs in lockstep: as recorded, and with what the options change. Without a change, one run against what was
    recorded. Says what was compared, what was not, and how close it was. Leaves with 0 if nothing
    differs, 1 if something does, 2 if the trace cannot be run.
    """
    from pykv.runtime.replay import Changes, replay
    from pykv.runtime.trace.file import read_trace

    changes = Changes(
        device=devices,
        model=None if other_model is None else model_path(other_model),
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        type_k=type_k,
        type_v=type_v,
        kv_unified=kv_unified,
        flash_attn=flash_attn,
        attention=None if attention is None else attention.value,
        reference_moves=reference_moves,
        swa_full=swa_full,
    )
    read = read_trace(trace)
    path = None if model is None else model_path(model)
    with _progress(len(read.steps)) as on_step:
        report = replay(read, changes, model=path, tolerance=tolerance, n_threads=n_threads, on_step=on_step)
    if json:
        write_json(_record(read, report, dump))
    else:
        _show(read, report, dump, context.command.params)
    if report.difference is not None:
        raise typer.Exit(1)


@contextmanager
def _progress(n_steps: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, if that is a terminal, while steps are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = notes()
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replay", total=n_steps)
        yield lambda n_done: bar.update(task, completed=n_done)


def _record(trace: TraceFile, report: Report, dump: bool) -> dict[str, object]:
    distances = report.distances
    record: dict[str, object] = {
        "trace": str(trace.path),
        "is_cut": trace.is_cut,
        "ended": trace.ended,
        "n_steps": report.n_steps,
        "n_done": report.n_done,
        "first": report.first,
        "second": report.second,
        "is_recording": report.is_recording,
        "notes": report.notes,
        "compared": report.compared,
        "not_compared": report.left_out,
        "tolerance": asdict(distances.tolerance),
        "farthest": {kind: _finite(asdict(one)) for kind, one in distances.farthest.items()},
        "n_rows": distances.n_rows,
        "n_top_differ": distances.n_top_differ,
        "difference": None if report.difference is None else _finite(asdict(report.difference)),
    }
    if dump:
        record["cells"] = [[" ".join(cells.words()) for cells in side.values()] for side in report.cells]
    return record


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record for JSON, which knows no infinity."""
    return {name: None if value == inf else value for name, value in record.items()}


def _show(trace: TraceFile, report: Report, dump: bool, typed: Iterable[Any]) -> None:
    from rich.text import Text

    out = results()
    out.print(_sides(report))
    for line in _facts(trace, report):
        out.print(Text(in_options(line, typed)), soft_wrap=True)
    found = report.difference
    if found is None:
        out.print(Text(f"no difference in {report.n_steps} steps", "bold green"))
    else:
        where = f"after step {found.step} (line {found.line})" if found.line else "after the last step"
        out.print(Text.assemble((f"differs {where}: ", "bold red"), found.did), soft_wrap=True)
        out.print(_difference(report))
    if dump:
        for name, side in zip(_names(report), report.cells, strict=False):
            _dump(name, side)


def _facts(trace: TraceFile, report: Report) -> Iterator[str]:
    """Yield what a verdict stands on: what was compared and how close it was."""
    distances = report.distances
    if trace.is_cut:
        yield "the last line of the trace is cut off and was left out"
    if trace.ended is not None:
        yield f"the trace ended early, what came afterwards is not in it: {trace.ended}"
    yield from report.notes
    yield f"compared: {', '.join(report.compared)}"
    for thing, why in report.left_out.items():
        yield f"not compared: {thing}: {why}"
    for kind, one in distances.farthest.items():
        where = ", ".join(f"{name} {value}" for name, value in one.where.items())
        within = "within" if one.nmse <= one.tolerance else "beyond"
        tops = f"; top-1 differs in {distances.n_top_differ} of {distances.n_rows} rows" if kind == "logits" else ""
        yield f"{kind}: {within} tolerance {one.tolerance:.3g}; largest NMSE {one.nmse:.3g} in {where}{tops}"


def _names(report: Report) -> tuple[str, str]:
    return ("run here", "recorded") if report.is_recording else ("first", "second")


def _sides(report: Report) -> Any:
    """Return the table of what ran; settings that both sides share stand once."""
    from rich.table import Table

    table = Table("", *_names(report), box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in report.first:
        one, other = report.first[name], report.second.get(name, "")
        table.add_row(name, str(one), str(other), style="bold" if one != other else "")
    return table


def _difference(report: Report) -> Any:
    from rich.table import Table

    found = report.difference
    assert found is not None, "only a difference is shown"
    table = Table.grid(padding=(0, 2))
    table.add_row("  what", found.place)
    for name, value in zip(_names(report), (found.first, found.second), strict=True):
        table.add_row(f"  {name}", value)
    if found.nmse is not None:
        table.add_row("  NMSE", f"{found.nmse:.3g}, tolerance {found.tolerance:.3g}")
    return table


def _dump(name: str, side: Cells) -> None:
    from pykv.cli.cellmap import cell_dump

    out = results()
    for part, cells in side.items():
        title = f"{name}, {part}" if part else name
        out.print(f"{title}: {cells.n_used} of {cells.n} cells used", style="bold", soft_wrap=True)
        out.print(cell_dump(cells))
