"""Comparison: what two saved states share, and what not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pykv.runtime.states.matched_cells import Run


class Two(NamedTuple):
    """Something that is not the same in both."""

    what: str
    first: str
    second: str


@dataclass(frozen=True)
class TokensApart:
    """Noted tokens that differ: at how many places of those that both have, at which first, and the number of all."""

    n: tuple[int, int]
    n_differ: int
    first: int


@dataclass(frozen=True)
class CellsApart:
    """Whose tokens a section has.

    Attributes
    ----------
    n_cells : of each state.
    n_both : tokens, by sequence and position, that both have.
    only : runs of positions that the other lacks.
    n_ext_differ : tokens of both with another x, y or token noted.
    """

    section: str
    n_cells: tuple[int, int]
    n_both: int
    only: tuple[list[Run], list[Run]]
    n_ext_differ: int

    @property
    def is_same(self) -> bool:
        return not (self.only[0] or self.only[1] or self.n_ext_differ)


@dataclass(frozen=True)
class TensorApart:
    """How far the rows of one tensor are apart, as numbers, rotations undone.

    Attributes
    ----------
    kind : "K", "V", "R" or "S".
    layer : of those that this section has.
    n_rows, n_differ : compared, and those of them that are not the same: of like form to the bit, else as numbers.
    nmse : squared distance as a part of the first's squared size; infinite where that is 0 or either is no number.
    max_abs : the largest distance of two elements.
    """

    section: str
    kind: str
    layer: int
    n_rows: int
    n_differ: int
    nmse: float
    max_abs: float


@dataclass
class Comparison:
    """What two states share and what not.

    Attributes
    ----------
    stored_otherwise : forms that differ, which is no difference of what is stored.
    differences : of families, sections and tensors, which cannot be compared then; of sequences that only one holds.
    seq_id : the only sequence that was compared, where one was asked for.
    tokens : None where they are the same, or one state notes none.
    warnings : what makes the comparison doubtful: checksums that do not fit, damaged notes.
    """

    stored_otherwise: list[Two] = field(default_factory=list)
    differences: list[Two] = field(default_factory=list)
    tokens: TokensApart | None = None
    cells: list[CellsApart] = field(default_factory=list)
    tensors: list[TensorApart] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seq_id: int | None = None

    @property
    def is_identical(self) -> bool:
        """Whether both hold the same, in whatever form."""
        is_same = all(one.is_same for one in self.cells) and not any(one.n_differ for one in self.tensors)
        return is_same and not self.differences and self.tokens is None
