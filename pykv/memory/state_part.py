"""What is written of one part of a memory, and what loading it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pykv.memory.state_runs import Sink
from pykv.state_format import Dialect, SectionLayout
from pykv.typing import AnyArray

ALL = -1
"""Every sequence: a state of the whole memory."""

Fill = Callable[[], object]
"""Writes the rows of one tensor."""


@dataclass(frozen=True)
class Payload:
    """Rows of one tensor, read when they are sent."""

    nbytes: int
    send: Callable[[Sink], None]


Piece = bytes | Payload
"""What stands one after the other in a state."""


@dataclass(frozen=True)
class Converted:
    """What was not as the memory stores it, and was made so.

    Attributes
    ----------
    what : each in words.
    error_k, error_v : how far the row that lost most is off, as a part of its largest element; 0 = nothing was lost.
    n_left_out : cells that no token will see, and that were left out.
    """

    what: tuple[str, ...] = ()
    error_k: float = 0.0
    error_v: float = 0.0
    n_left_out: int = 0

    def __bool__(self) -> bool:
        return bool(self.what)

    @property
    def is_lossless(self) -> bool:
        """Whether all that the state held is here to the bit."""
        return not (self.error_k or self.error_v or self.n_left_out)


@dataclass
class Loading:
    """One state on its way into a memory.

    Attributes
    ----------
    seq_id : the sequence that gets it, or `ALL`.
    data : (n,) uint8, the bytes that the state's spans count.
    convert : whether what differs from what the memory stores is converted.
    placed : per set of cells (by `id`), the section that was put there, and where; caches with one set share it.
    what, errors, n_left_out : what becomes a `Converted`; `errors` are of K and of V.
    """

    seq_id: int
    data: AnyArray
    convert: bool = False
    placed: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    what: list[str] = field(default_factory=list)
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0])
    n_left_out: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the state is one of the whole memory."""
        return self.seq_id == ALL

    def note(self, what: str) -> None:
        """Say what is converted, once."""
        if what not in self.what:
            self.what.append(what)

    def leave_out(self, n: int, which: str) -> None:
        """Count cells that are not loaded, and say why."""
        if n:
            self.n_left_out += n
            self.what.append(f"{n} cells {which} left out")

    def result(self) -> Converted:
        """Return what was converted."""
        error_k, error_v = self.errors
        return Converted(tuple(self.what), error_k, error_v, self.n_left_out)


class StatePart(Protocol):
    """One part of a memory, as states see it."""

    @property
    def layout(self) -> SectionLayout:
        """What it stores."""
        ...

    @property
    def version(self) -> int:
        """Another number after every change."""
        ...

    def pieces(self, seq_id: int, dialect: Dialect) -> list[Piece]:
        """Return what is to be written of a sequence, or of `ALL`."""
        ...

    def place(self, section: Any, loading: Loading) -> list[Fill]:
        """Let the cells hold what a section lists. Mutates the bookkeeping only; returns what writes the rows."""
        ...
