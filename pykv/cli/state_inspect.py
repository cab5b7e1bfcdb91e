"""``pykv state inspect``: what a saved state holds, and whether it is what was noted of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import options
from pykv.cli.console import results, size, write_json

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = "pykv state inspect chat.ggsq --json"

N_ENDS = 4
"""Tokens that are shown of each end of many."""

N_RUNS = 6
"""Runs of positions that are shown of many."""


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A session or sequence file, or bytes of a state.")],
    json: options.Json = False,
) -> None:
    """Show what a saved state holds: cells, positions, types, sizes, notes and checksums.

    Of a damaged file, as much as can be read, and what is wrong and where; then it leaves with 1.
    """
    from pykv.errors import StateError
    from pykv.runtime.states.describe import describe

    said = describe(file)
    if json:
        write_json(said)
    else:
        _show(said)
    faults = said["faults"]
    if faults:
        more = f" (and {len(faults) - 1} more, see above)" if len(faults) > 1 else ""
        text = faults[0]["what"]
        raise StateError((text if text.startswith(file) else f"{file}: {text}") + more, offset=faults[0]["offset"])


def _show(said: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    out = results()
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(said):
        facts.add_row(name, Text(value, "bold red" if name == "WRONG" else ""))
    out.print(facts)
    if said.get("sections"):
        out.print(_sections(said["sections"]))


def _facts(said: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "file", said["file"]
    yield "kind", said["kind"]
    if "session" in said:
        yield "session", f"{said['session'] or 'not known'}, which is the file to inspect, convert or load"
    else:
        yield from _head(said)
    yield "size", f"{size(said['nbytes'])} ({said['nbytes']} bytes)"
    yield "checksums", _checksums(said)
    yield from _notes(said["notes"])
    for fault in said["faults"]:
        yield "WRONG", fault["what"]


def _head(said: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "dialect", said["dialect"] + ("" if said["says_dialect"] else " (found out, it does not say)")
    if said["architecture"] is not None:
        yield "architecture", said["architecture"]
    if said["sequence"] is not None:
        yield "sequence", str(said["sequence"])
    if said["tokens"] is not None:
        yield "tokens", _tokens(said["tokens"])


def _tokens(tokens: list[int]) -> str:
    if not tokens:
        return "none"
    is_long = len(tokens) > 2 * N_ENDS
    shown = [*tokens[:N_ENDS], "...", *tokens[-N_ENDS:]] if is_long else tokens
    return f"{len(tokens)}: {' '.join(map(str, shown))}"


def _checksums(said: dict[str, Any]) -> str:
    sums = said["checksums"]
    if "session" in said:
        return f"{sums['n_noted']} noted; inspect the session to compare them"
    if sums["wrong"]:
        return f"WRONG for {', '.join(sums['wrong'])}{'' if len(sums['wrong']) == sums['n_noted'] else ', else right'}"
    return "noted, and right" if sums["is_verified"] else "none noted"


def _notes(said: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if said is None:
        yield "notes", "none"
        return
    yield "model", f"fingerprint {said['model']}" if said["model"] else "not noted"
    for name in ("rope", "types"):
        if said[name]:
            yield name, ", ".join(f"{key} {value}" for key, value in said[name].items() if value is not None)
    if said["extra"]:
        yield "extra", ", ".join(said["extra"])
    for name, nbytes in said["attachments"].items():
        yield "attachment", f"{name}, {size(nbytes)}"


def _sections(sections: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("section", "stream", "cells", "positions", "tensors", "size")
    for section in sections:
        streams = section.get("streams", [section])
        shown = [(i, one) for i, one in enumerate(streams) if one["n_cells"]] or [(0, streams[0])]
        for i, stream in shown:
            of = f"{i} of {len(streams)}" if "streams" in section else ""
            nbytes = sum(one["nbytes"] for group in stream.get("tensors", {}).values() for one in group)
            cells = (section["name"], of, str(stream["n_cells"]), _positions(stream), _tensors(stream), size(nbytes))
            table.add_row(*map(Text, cells))
    return table


def _positions(stream: dict[str, Any]) -> str:
    return "\n".join(f"{_who(one['sequence'])}: {_runs(one['positions'])}" for one in stream["sequences"])


def _who(seq_id: int) -> str:
    return "nobody" if seq_id < 0 else f"sequence {seq_id}"


def _runs(runs: list[list[int]]) -> str:
    told = ", ".join(f"{a}..{b}" if a < b else str(a) for a, b in runs[:N_RUNS])
    return told + (f", and {len(runs) - N_RUNS} more runs" if len(runs) > N_RUNS else "")


def _tensors(stream: dict[str, Any]) -> str:
    lines = []
    for kind, groups in stream.get("tensors", {}).items():
        order = f", by {stream['v_layout']}" if kind == "V" else ""
        lines += [f"{kind}: {one['n']} x {one['type']}, {one['width']} wide{order}" for one in groups if one["width"]]
    rotation = stream.get("rotation")
    if rotation is None and "rotation" in stream:
        lines.append("rotation not said")
    elif rotation is not None and any(rotation):
        lines.append(f"rotated by {rotation[0]} (K), {rotation[1]} (V)")
    if stream.get("has_ext"):
        lines.append("with x, y and token of each cell")
    return "\n".join(lines)
