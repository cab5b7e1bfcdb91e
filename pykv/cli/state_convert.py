"""``pykv state convert``: a saved state in another form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import options
from pykv.cli.console import finite, results, size, slow_bar, write_json
from pykv.errors import ParamError

if TYPE_CHECKING:
    from pykv.runtime.states.convert import Conversion

EXAMPLE = "pykv state convert chat.ggsn one.ggsq --to sequence --seq 1 --unify"


N_DIGITS = 20
"""More than any width has."""


def command(
    *,
    source: Annotated[str, typer.Argument(metavar="IN", help="The saved state.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="The file to write; it is replaced as a whole.")],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="KIND", help="session, sequence, context-state or sequence-state."),
    ] = None,
    seq_id: Annotated[
        int | None,
        typer.Option("--seq", metavar="N", help="The sequence to take out of a session, or the number it gets."),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option("--dialect", metavar="V/V", help="Versions of session and sequence files: 11/4, 10/3.")
    ] = None,
    type_k: Annotated[str | None, typer.Option("--type-k", metavar="TYPE", help="How keys are stored.")] = None,
    type_v: Annotated[str | None, typer.Option("--type-v", metavar="TYPE", help="How values are stored.")] = None,
    v_layout: Annotated[
        str | None,
        typer.Option("--v-layout", metavar="cell|channel", help="By cell, or by channel as without flash attention."),
    ] = None,
    n_stream: Annotated[
        int | None, typer.Option("--streams", metavar="N", help="Streams of cells: 1, or one for each sequence.")
    ] = None,
    unify: Annotated[bool, typer.Option("--unify", help="All cells in one stream: --streams 1.")] = False,
    rotation: Annotated[
        str | None,
        typer.Option("--rotation", metavar="K,V", help="Widths by which quantised K and V are rotated: 64,64 or 0,0."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", metavar="NAME", help="The model's architecture, for a session out of a sequence."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a saved state once more, in another form, and say what that loses.

    What no option names stays as it is; notes are carried along. Needs no model.
    """
    from pykv.runtime.states.convert import convert

    if unify and n_stream not in (None, 1):
        raise ParamError(f"n_stream={n_stream}: --unify means 1")
    with slow_bar("convert", is_shown=not json) as on_progress:
        done = convert(
            source,
            target,
            to=to,  # type: ignore[arg-type]
            seq_id=seq_id,
            dialect=dialect,
            type_k=type_k,
            type_v=type_v,
            v_layout=v_layout,  # type: ignore[arg-type]
            n_stream=1 if unify else n_stream,
            rotation=parse_rotation(rotation),
            arch=arch,
            on_progress=on_progress,
        )
    if json:
        write_json(_record(target, done))
    else:
        _show(target, done)


def parse_rotation(text: str | None) -> tuple[int, int] | None:
    """Return two widths; raises `ParamError` where the text is something else."""
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and len(part) < N_DIGITS for part in parts):
        raise ParamError(f"rotation={text!r}: expected two numbers with a comma between them")
    return int(parts[0]), int(parts[1])


def _record(target: str, done: Conversion) -> dict[str, Any]:
    return {
        "file": target,
        "kind": done.kind.value,
        "dialect": str(done.dialect),
        "nbytes": done.nbytes,
        "is_lossless": done.is_lossless,
        "has_notes": done.has_notes,
        "changes": [
            {"what": one.what, "is_lossless": one.is_lossless, "largest_error": finite(one.error)}
            for one in done.changes
        ],
    }


def _show(target: str, done: Conversion) -> None:
    from rich.text import Text

    out = results()
    for one in done.changes or ():
        mark = ("lossless", "green") if one.is_lossless else ("lossy", "bold yellow")
        error = f"; largest error {one.error:.2g} of a row's largest element" if one.error else ""
        out.print(Text.assemble("  ", mark, f"{'':{9 - len(mark[0])}}{one.what}{error}"), soft_wrap=True)
    if not done.changes:
        out.print("  nothing is changed")
    notes = ", with its notes" if done.has_notes else ""
    out.print(Text(f"{target}: {done.kind.value}, {done.dialect}, {size(done.nbytes)}{notes}"), soft_wrap=True)
