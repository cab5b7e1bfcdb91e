"""ConversionPlan: what a conversion will write and what that changes, known before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from pykv.ggml import DType
from pykv.runtime.states.moved_rows import MovedRows
from pykv.runtime.states.read_state import Rotation
from pykv.state_format import Dialect, Kind


@dataclass(frozen=True)
class Wanted:
    """What the result should be; None = as the source is.

    Attributes
    ----------
    types : of K and of V.
    by_channel : whether V lies by channel.
    rotation : by which widths quantised K and V are rotated: in the result, and in a source that does not say so.
    """

    kind: Kind | None = None
    seq_id: int | None = None
    dialect: Dialect | None = None
    types: tuple[DType | None, DType | None] = (None, None)
    by_channel: bool | None = None
    n_stream: int | None = None
    rotation: Rotation | None = None
    arch: str | None = None


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was.

    Attributes
    ----------
    error : how far the row that lost most is off, as a part of its largest element; 0 where that is not the question.
    """

    what: str
    is_lossless: bool = True
    error: float = 0.0


@dataclass
class ConversionPlan:
    """What is written, in order, and what is not as it was.

    Attributes
    ----------
    part_starts : which pieces begin a part of the result: the head, and each section.
    moved : the tensors that are converted, by what is done to them.
    uses_rotation : whether any row is rotated as was asked for, or was said to be.
    """

    kind: Kind
    dialect: Dialect
    pieces: list[bytes | MovedRows] = field(default_factory=list)
    part_starts: list[int] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    moved: dict[str, list[MovedRows]] = field(default_factory=dict)
    uses_rotation: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(self.part_nbytes)

    @property
    def part_nbytes(self) -> list[int]:
        """Bytes of the head, and of each section."""
        ends = [*self.part_starts[1:], len(self.pieces)]
        parts = [self.pieces[start:end] for start, end in zip(self.part_starts, ends, strict=True)]
        return [sum(len(one) if isinstance(one, bytes) else one.nbytes for one in part) for part in parts]

    def begin_part(self) -> None:
        """Let what is appended from now on be another part of the result."""
        self.part_starts.append(len(self.pieces))

    def note(self, what: str, *, is_lossless: bool = True) -> None:
        """Say what is not as it was, once."""
        change = Change(what, is_lossless)
        if change not in self.changes:
            self.changes.append(change)

    def all_changes(self) -> tuple[Change, ...]:
        """Return them with the errors, which are known once all has been sent."""
        errors = {what: max(one.error for one in moved) for what, moved in self.moved.items()}
        return (*self.changes, *(Change(what, error == 0, error) for what, error in errors.items()))
