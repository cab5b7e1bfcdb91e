"""A picture of a report: divergence by position, and quality against time. Needs matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from pykv.errors import ParamError
from pykv.quality.measure import QualityReport


def require() -> None:
    """Raise unless pictures can be drawn.

    Raises
    ------
    ParamError : matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ParamError('plot: needs matplotlib; pip install "pykv-ggml[plot]"')


def draw(report: QualityReport, path: Path) -> None:
    """Draw a report into a file, whose ending names the format.

    Raises
    ------
    ParamError : there is no such format, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_position, by_time = figure.subplots(1, 2)
    for run in report.runs:
        name = run.name if run.name != "repaired" else f"{run.share:.0%} computed again"
        by_position.semilogy(np.maximum(run.agreement.kl, 1e-12), label=name, linewidth=1)
    by_position.set(xlabel="tokens behind the cut", ylabel="divergence from a cold run, nats")
    by_position.legend(fontsize="small")
    tried = [run for run in report.runs if run.name in ("moved", "repaired")]
    by_time.semilogy(
        [run.seconds + run.choosing_seconds for run in tried],
        [max(run.agreement.mean_kl, 1e-12) for run in tried],
        "o-",
    )
    for run in tried:
        at = run.seconds + run.choosing_seconds, max(run.agreement.mean_kl, 1e-12)
        by_time.annotate(f"{run.share:.0%}", at, textcoords="offset points", xytext=(5, 5))
    by_time.axvline(report.cold_seconds, linestyle=":", color="grey", label="cold")
    by_time.set(xlabel="seconds until the next token", ylabel="mean divergence, nats")
    by_time.legend(fontsize="small")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ParamError(f"plot={str(path)!r} cannot be drawn: {error}") from error
