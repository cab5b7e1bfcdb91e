"""``pykv quality shift``: what a context shift costs in quality"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pykv.cli import options
from pykv.cli.quality_report import After, By, ModelFile, Plot, Repair, Text, Tokens, TypeK, TypeV, measure_and_show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pykv.quality import Cut

EXAMPLE = "pykv quality shift -m smollm2-135m --text book.txt --tokens 512 --repair 0,0.1,0.25,1"


def command(
    *,
    model: ModelFile,
    text: Text,
    n_tokens: Tokens = 512,
    n_after: After = 64,
    n_keep: Annotated[int, typer.Option("--keep", metavar="N", min=0, help="Tokens kept at the front.")] = 1,
    n_discard: Annotated[
        int, typer.Option("--discard", metavar="N", min=0, help="Tokens dropped behind them; 0 = half.")
    ] = 0,
    repair: Repair = "0",
    by: By = "first",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    plot: Plot = None,
    n_threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Shift a full context, and compare what follows with a cold computation of what is left."""
    from pykv.quality import shift_cut

    def cut(tokens: Sequence[int]) -> Cut:
        return shift_cut(tokens, n_after, n_keep, n_discard)

    measure_and_show(
        model, text, n_tokens, cut, repair, by, plot, json, type_k=type_k, type_v=type_v, n_threads=n_threads
    )
