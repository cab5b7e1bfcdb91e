"""``pykv quality chunk``: what the reuse of a chunk costs in quality"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pykv.cli import options
from pykv.cli.quality_report import After, By, ModelFile, Plot, Repair, Text, Tokens, TypeK, TypeV, measure_and_show
from pykv.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pykv.quality import Cut

EXAMPLE = "pykv quality chunk -m smollm2-135m --text book.txt --cut 100-200 --repair 0,0.15 --by deviation"


def command(
    *,
    model: ModelFile,
    text: Text,
    cut: Annotated[str, typer.Option("--cut", metavar="A-B", help="Tokens from A on and before B, which go.")],
    n_tokens: Tokens = 512,
    n_after: After = 64,
    repair: Repair = "0",
    by: By = "first",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    plot: Plot = None,
    n_threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Reuse what lies behind a part that a new prompt lacks, and compare with a cold computation of the prompt."""
    from pykv.quality import chunk_cut

    start, is_range, end = cut.partition("-")
    if not (is_range and start.isdecimal() and end.isdecimal()):
        raise ParamError(f"cut={cut!r} must be two positions, such as 100-200")

    def made(tokens: Sequence[int]) -> Cut:
        return chunk_cut(tokens, n_after, int(start), int(end))

    measure_and_show(
        model, text, n_tokens, made, repair, by, plot, json, type_k=type_k, type_v=type_v, n_threads=n_threads
    )
