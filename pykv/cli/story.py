"""What the demo tells: numbered steps, what was said, and the cells; with the figures kept for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pykv.cli.console import duration, rate

if TYPE_CHECKING:
    from rich.console import Console

    from pykv.cells import CellsView
    from pykv.cli.generate import Pace

MARGIN = "   "


@dataclass
class Story:
    """Shows each step on a console.

    Attributes
    ----------
    steps : the figures of every step, by its name.
    """

    out: Console
    steps: dict[str, dict[str, float]] = field(default_factory=dict)

    def step(self, name: str, title: str, **figures: float) -> None:
        """Show one finished step and remember its figures."""
        from rich.text import Text

        self.steps[name] = figures
        self.out.print(Text.assemble((f"{len(self.steps)}. ", "bold"), title), soft_wrap=True)

    def pace(self, name: str, title: str, pace: Pace, **figures: float) -> None:
        """Show a step that is a number of tokens in a time."""
        speed = f"{pace.n_tokens} tokens in {duration(pace.seconds)}, {rate(pace.per_second)} tokens/s"
        self.step(name, f"{title}: {speed}", **pace.record(), **figures)

    def say(self, who: str, text: str) -> None:
        """Show what somebody in a conversation said."""
        from rich.padding import Padding
        from rich.text import Text

        said = Text.assemble((f"{who}: ", "bold"), " ".join(text.split()))
        self.out.print(Padding(said, (0, 0, 0, len(MARGIN)), expand=False))

    def note(self, text: str) -> None:
        """Show a remark below a step."""
        self.out.print(MARGIN + text, markup=False, soft_wrap=True)

    def cells(self, cells: CellsView) -> None:
        """Draw the cells."""
        from pykv.cli.cellmap import cell_map

        self.out.print(cell_map(cells), end="")
