"""A picture of a report: how far each device lies from the reference, layer by layer. Needs matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pykv.errors import ParamError
from pykv.parity.report import ORDER, ParityReport

_LEAST = 1e-16
"""Where equal rows are drawn, on a scale that has no 0."""


def require() -> None:
    """Raise unless pictures can be drawn.

    Raises
    ------
    ParamError : matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ParamError('plot: needs matplotlib; pip install "pykv-ggml[plot]"')


def draw(report: ParityReport, path: Path) -> None:
    """Draw a report into a file, whose ending names the format.

    Raises
    ------
    ParamError : there is no such format, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    kinds = [kind for kind in ORDER if kind in report.split.by_layer]
    figure = Figure(figsize=(max(4, 4 * len(kinds)), 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, max(1, len(kinds)), squeeze=False)[0], kinds, strict=False):
        for side in (report.split, *report.sides):
            layers = sorted(side.by_layer.get(kind, {}).items())
            is_split = side is report.split
            axes.semilogy(
                [il for il, _ in layers],
                [max(one.nmse, _LEAST) for _, one in layers],
                linestyle=":" if is_split else "-",
                marker="." if is_split else "o",
                label=side.name,
            )
        axes.set(title=kind, xlabel="layer", ylabel=f"NMSE against {report.reference}")
    figure.axes[0].legend(fontsize="small")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ParamError(f"plot={str(path)!r} cannot be drawn: {error}") from error
