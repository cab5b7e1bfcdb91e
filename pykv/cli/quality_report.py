"""What the commands of ``pykv quality`` share: their options, and how a report is shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli.catalog import model_path
from pykv.cli.console import duration, results, slow_bar, write_json
from pykv.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pykv.quality import Cut, QualityReport

ModelFile = Annotated[str, typer.Option("--model", "-m", metavar="FILE", help="GGUF file, or name that pull lists.")]
Text = Annotated[str, typer.Option("--text", metavar="FILE", help="The text; - reads it from stdin.")]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Use so many tokens of it; 0 = all.")]
After = Annotated[
    int, typer.Option("--after", metavar="N", min=1, help="Tokens behind the cut, on which quality is told.")
]
Repair = Annotated[
    str, typer.Option("--repair", metavar="F,F", help="Shares of the moved tokens to compute again, such as 0,0.15,1.")
]
By = Annotated[
    str, typer.Option("--by", metavar="WAY", help="Which: the first, or those of the largest deviation of keys.")
]
TypeK = Annotated[str, typer.Option("--type-k", metavar="TYPE", help="How keys are stored.")]
TypeV = Annotated[str, typer.Option("--type-v", metavar="TYPE", help="How values are stored.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw divergence by position, and quality against time.")
]


def measure_and_show(
    model: str,
    text: str,
    n_tokens: int,
    cut: Callable[[Sequence[int]], Cut],
    repair: str,
    by: str,
    plot: Path | None,
    json: bool,
    **params: Any,
) -> None:
    """Measure a cut of a text, and show what it costs."""
    import pykv
    from pykv.quality import measure
    from pykv.quality.repair import check_choice

    shares, way = _shares(repair), check_choice(by)
    if plot is not None:
        from pykv.quality import drawing

        drawing.require()
    with pykv.Model.load(model_path(model)) as loaded:
        tokens = loaded.tokenizer.encode(_read(text))
        with slow_bar("measuring") as on_step:
            report = measure(
                loaded, cut(tokens[:n_tokens] if n_tokens else tokens), shares, way, on_step=on_step, **params
            )
    if plot is not None:
        drawing.draw(report, plot)
    if json:
        write_json(_record(report))
    else:
        _show(report)


def _read(text: str) -> str:
    if text == "-":
        return sys.stdin.read()
    try:
        return Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ParamError(f"text={text!r} is no UTF-8: {error}") from None
    except OSError as error:
        raise ParamError(f"text={text!r} cannot be read: {error.strerror}") from None


def _shares(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise ParamError(f"repair={text!r} must be shares with commas between, such as 0,0.15,1") from None


def _record(report: QualityReport) -> dict[str, Any]:
    cut = report.cut
    return {
        "n_stored": len(cut.stored),
        "removed": [cut.start, cut.end],
        "n_moved": len(cut.moved),
        "n_after": len(cut.after),
        "cold_seconds": report.cold_seconds,
        "runs": [
            {
                "name": run.name,
                "share": run.share,
                "n_recomputed": run.n_recomputed,
                "seconds": run.seconds,
                "choosing_seconds": run.choosing_seconds,
                "mean_kl": run.agreement.mean_kl,
                "top_1": run.agreement.top_1,
                "perplexity_ratio": run.agreement.perplexity_ratio,
                "kl": run.agreement.kl.tolist(),
                "same_top": run.agreement.same_top.tolist(),
            }
            for run in report.runs
        ],
    }


_NAMES = {"rounding": "cold, 32 at once", "uncut": "nothing cut", "moved": "moved"}


def _show(report: QualityReport) -> None:
    from rich.table import Table

    cut, console = report.cut, results()
    console.print(
        f"{len(cut.stored)} tokens, of which {cut.start} to {cut.end - 1} go and {len(cut.moved)} move; quality over "
        f"the {len(cut.after)} that follow, against a cold computation ({duration(report.cold_seconds)})",
        soft_wrap=True,
    )
    table = Table("way", "tokens", "KL, nats", "top-1", "perplexity", "took", "of cold")
    for run in report.runs:
        is_warm = run.name in ("moved", "repaired")
        agreement = run.agreement
        table.add_row(
            _NAMES.get(run.name, f"{run.share:.0%} again"),
            str(run.n_recomputed) if is_warm else "",
            f"{agreement.mean_kl:.3g}",
            f"{agreement.top_1:.0%}",
            f"x {agreement.perplexity_ratio:.3f}",
            duration(run.seconds) if is_warm else "",
            f"{run.seconds / report.cold_seconds:.0%}" if is_warm else "",
        )
    console.print(table)
    if choosing := max(run.choosing_seconds for run in report.runs):
        console.print(
            f"choosing took {duration(choosing)} beside: all moved tokens were computed for it", soft_wrap=True
        )
