"""ParityReport: how far each device lies from the reference, where it leaves it first, and what that means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["same", "rounding", "differs"]

ORDER = ("K", "V", "attention", "R", "S")
"""In which order a layer makes them, so that the first that is off tells which operation is."""

OPS = {
    "K": "the keys of this layer: norm, projection, rotation, or a move of stored keys",
    "V": "the values of this layer: norm or projection",
    "attention": "attention over stored keys and values",
    "R": "the recent inputs of this layer's state",
    "S": "the state of this layer",
    "logits": "what follows the last layer's attention: its feed-forward, the last norm, or the output matrix",
}
"""What computes it. Keys and values that are off behind an attention that is not point to the feed-forward before."""


@dataclass(frozen=True)
class Place:
    """Where something was compared.

    Attributes
    ----------
    step : number of the step, from 1.
    did : the step in words.
    kind : "K", "V", "attention" (outputs), "R" and "S" (of states), or "logits".
    layer : which one; None for logits.
    """

    step: int
    did: str
    kind: str
    layer: int | None

    def __str__(self) -> str:
        where = self.kind if self.layer is None else f"{self.kind} of layer {self.layer}"
        return f"{where}, step {self.step} ({self.did})"


@dataclass(frozen=True)
class Distance:
    """The farthest that rows of one kind and layer came to lie from the reference.

    Attributes
    ----------
    nmse : squared error over squared size, of all rows of one step; infinite where only one side is a number.
    max_abs : largest difference of two numbers.
    limit : NMSE up to which rounding explains it.
    """

    nmse: float
    max_abs: float
    limit: float

    @property
    def is_within(self) -> bool:
        return self.nmse <= self.limit


@dataclass(frozen=True)
class Flip:
    """A row of logits whose likeliest token is another one.

    Attributes
    ----------
    step, row : where.
    expected, found : the likeliest tokens.
    gap : by how much the reference prefers its own; small = a near tie, which rounding may turn.
    """

    step: int
    row: int
    expected: int
    found: int
    gap: float


@dataclass(frozen=True)
class SideReport:
    """One device held against the reference.

    Attributes
    ----------
    name : the device as it was given, or what the reference did otherwise.
    attention : which way attention took, for tokens and for prompts.
    by_layer : kind → layer → the farthest; "logits" has one layer, -1.
    n_rows : rows of logits compared.
    flips : rows with another likeliest token.
    mean_kl, max_kl : divergence of the next-token distributions from the reference's, in nats.
    first : the first place that rounding does not explain, None if there is none.
    verdict : "same", "rounding" or "differs".
    """

    name: str
    attention: str
    by_layer: dict[str, dict[int, Distance]]
    n_rows: int
    flips: tuple[Flip, ...]
    mean_kl: float
    max_kl: float
    first: Place | None
    verdict: Verdict

    @property
    def logits(self) -> Distance:
        return self.by_layer["logits"][-1]

    def worst(self, kind: str) -> tuple[int, Distance] | None:
        """Return the layer of a kind that lies farthest, and how far; None where there is no such kind."""
        found = self.by_layer.get(kind, {})
        return max(found.items(), key=lambda one: one[1].nmse) if found else None


@dataclass(frozen=True)
class ParityReport:
    """What a comparison found.

    Attributes
    ----------
    reference : the device that the others are held against.
    n_steps : steps of the program.
    split : the reference with other ubatches: what rounding alone makes.
    sides : the other devices.
    """

    reference: str
    n_steps: int
    split: SideReport
    sides: tuple[SideReport, ...]

    @property
    def agrees(self) -> bool:
        """Whether no device differs by more than rounding."""
        return all(side.verdict != "differs" for side in self.sides)
