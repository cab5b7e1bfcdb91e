"""States: what a memory holds, in the bytes of state files; written as a stream, and loaded whole or not at all.

Source: spec state_format.md sections 2 to 6.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pykv.cells import Undo
from pykv.cells.arguments import boolean, sequence_id, shown
from pykv.errors import ConcurrentUseError, ParamError, StateError
from pykv.memory.guard import Guard
from pykv.memory.state_part import ALL, Converted, Fill, Loading, Piece, StatePart
from pykv.memory.state_runs import Sink
from pykv.memory.verb import Listener, step, verb
from pykv.state_format import NEWEST, Dialect, KVSection, RowsRecord, Section, SectionLayout
from pykv.state_format.parse import hold
from pykv.typing import AnyArray, as_int

if TYPE_CHECKING:
    from typing_extensions import Buffer


_NO_STATE = "the parts of the state do not belong together: {}"
_LACKS_TOKENS = (
    "a partial state goes onto a sequence that holds the same tokens up to its end, so decode or load those first: {}"
)


class StateImage:
    """What `StateFiles.state_image` found, to be written while the memory is as it was then.

    Attributes
    ----------
    section_nbytes : bytes of what each part of the memory wrote, in order.
    nbytes : bytes of it all.
    """

    def __init__(self, memory: StateFiles, parts: Sequence[StatePart], sections: Sequence[Sequence[Piece]]) -> None:
        self._memory, self._parts = memory, parts
        self._pieces = [piece for section in sections for piece in section]
        self._versions = [part.version for part in parts]
        self.section_nbytes = tuple(sum(map(_nbytes, section)) for section in sections)
        self.nbytes = sum(self.section_nbytes)

    def write_to(self, sink: Sink) -> None:
        """Give all bytes to a sink, in order. What it gets may be the memory's own: it must not keep it.

        Raises
        ------
        ConcurrentUseError : the memory has changed since.
        UseAfterCloseError : it is closed.
        """
        self._memory.require_open()
        with self._memory.guard:
            if [part.version for part in self._parts] != self._versions:
                raise ConcurrentUseError("the memory has changed since this state was taken; take it anew")
            for one in self._pieces:
                if isinstance(one, bytes):
                    sink(memoryview(one))
                else:
                    one.send(sink)


class HasStates(Protocol):
    """A memory that can stand in another one and be saved with it."""

    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """See `StateFiles.state_parts`."""
        ...


class StateFiles(ABC):
    """A memory whose content can be saved and loaded."""

    guard: Guard
    listeners: list[Listener]

    def state_layouts(self, partial: bool = False) -> tuple[SectionLayout, ...]:
        """Return what each part stores, in the order of a state's sections.

        Parameters
        ----------
        partial : without what a cut can bring back: caches that hold all tokens, beside windows or states.
        """
        self.require_open()
        return tuple(part.layout for part in self.state_parts(boolean("partial", partial)))

    def state_image(self, seq_id: int, partial: bool = False, dialect: Dialect = NEWEST) -> StateImage:
        """Return a sequence, or with -1 all, as bytes that are still to be written. Carries out what is queued.

        A state that was taken back is written as what it is now. Of a window, a sequence's state has what its last
        token sees, that of all has everything stored.
        """
        self.require_open()
        seq_id, partial = self._sequence_or_all(seq_id), boolean("partial", partial)
        if not isinstance(dialect, Dialect):
            raise ParamError(f"dialect={shown(dialect)}: must be one of {', '.join(map(str, Dialect))}")
        with self.guard:
            # differs from llama.cpp: keys follow their positions first (there: old keys are saved at new positions)
            self.follow()
            parts = self.state_parts(partial)
            return StateImage(self, parts, [part.pieces(seq_id, dialect) for part in parts])

    @verb
    def load_state(
        self, seq_id: int, sections: Sequence[Section], source: Buffer, partial: bool = False, convert: bool = False
    ) -> Converted:
        """Let a sequence, or with -1 the memory, hold what a state holds, and nothing else. Carries out what is queued.

        A sequence gets cells wherever there is room, of which some may be such that a window hides for good, and of
        states the latest only, with none to go back to. All of the memory begins at the first cells.

        Parameters
        ----------
        sections : the state, parsed.
        source : the bytes that it was parsed from.
        partial : it was saved so; what it lacks stays as it is up to where it ends, and is removed from there on.
        convert : convert what is not as this memory stores it: the order of V, shared cells or streams, more or fewer
            sequences than there may be here, element types and rotations. The answer says what was lost.

        Raises
        ------
        StateError : it does not fit. Nothing has changed.
        NoSlotError : there is no room. Nothing has changed.
        """
        seq_id, partial = self._sequence_or_all(seq_id), boolean("partial", partial)
        loading = Loading(seq_id, _bytes_of(source), boolean("convert", convert))
        pairs = self._fitting(sections, partial, loading)
        self.follow()
        fills = self._place(pairs, loading, partial)
        self.note_cut(seq_id)
        try:
            for fill in fills:  # at last: what they overwrite could not be had again
                fill()
        except BaseException:
            step(self.seq_rm)(seq_id)  # what it holds now is neither old nor new
            raise
        return loading.result()

    def _fitting(self, sections: Sequence[Section], partial: bool, loading: Loading) -> list[tuple[StatePart, Section]]:
        """Return each part with its section, all of which can be loaded as far as one can tell before."""
        parts = self.state_parts(partial)
        if len(sections) != len(parts):
            raise StateError(f"a state of {len(sections)} parts, and the memory has {len(parts)}")
        for part, section in zip(parts, sections, strict=True):
            hold(section, part.layout, whole=loading.is_whole, strict=not loading.convert)
            _check_spans(section, loading.data)
        return list(zip(parts, sections, strict=True))

    def _place(self, pairs: Sequence[tuple[StatePart, Section]], loading: Loading, partial: bool) -> list[Fill]:
        """Let the cells of all parts, or of none, hold what the sections list; returns what writes the rows."""
        undo = self.bookmark()
        try:
            fills = [fill for part, section in pairs for fill in part.place(section, loading)]
            if partial:
                for seq_id in range(self.n_seq_max) if loading.is_whole else (loading.seq_id,):
                    self.cut_rest(seq_id)
            misfit = self.ends_misfit()
            if misfit is not None:
                raise StateError(_LACKS_TOKENS.format(misfit) if partial else _NO_STATE.format(misfit))
        except BaseException:
            undo()
            raise
        return fills

    def ends_misfit(self) -> str | None:
        """Say which parts end where they may not beside each other. For who has entered the guard."""
        return None

    def cut_rest(self, seq_id: int) -> None:
        """Remove what a partial state lacks behind the end of a sequence in it. For who has entered the guard."""
        return

    def note_cut(self, seq_id: int) -> None:
        """Note that a sequence, or with -1 each, may lack tokens that a window shows. For who has entered the guard."""
        return

    def _sequence_or_all(self, seq_id: int) -> int:
        return ALL if as_int(seq_id) == ALL else sequence_id("seq_id", seq_id, self.n_seq_max)

    @abstractmethod
    def state_parts(self, partial: bool) -> tuple[StatePart, ...]:
        """Return what a state is made of, in order."""

    @property
    @abstractmethod
    def n_seq_max(self) -> int:
        """Sequences."""

    @abstractmethod
    def require_open(self) -> None:
        """Raise `UseAfterCloseError` if it is closed."""

    @abstractmethod
    def follow(self) -> None:
        """Carry out queued changes of stored data."""

    @abstractmethod
    def bookmark(self) -> Undo:
        """Return what puts the bookkeeping back to what it is now."""

    @abstractmethod
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a sequence, or all with -1."""


def _nbytes(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.nbytes


def _bytes_of(source: Buffer) -> AnyArray:
    try:
        data: AnyArray = np.frombuffer(memoryview(source), np.uint8)
    except (TypeError, ValueError, BufferError):
        raise ParamError(f"source={shown(source)}: must be bytes that lie together") from None
    return data


def _check_spans(section: Section, data: AnyArray) -> None:
    """Refuse a source in which not all that a section names lies."""
    if isinstance(section, KVSection):
        rows: list[RowsRecord] = [one for stream in section.streams for one in (*stream.k, *stream.v)]
        n_cells = [stream.cells.n for stream in section.streams for _ in (*stream.k, *stream.v)]
    else:
        rows = [*section.r, *section.s]
        n_cells = [section.cells.n] * len(rows)
    for one, n in zip(rows, n_cells, strict=True):
        start, nbytes = one.span
        if nbytes != n * one.row_bytes or not 0 <= start <= start + nbytes <= data.size:
            where = f"{start} to {start + nbytes}"
            raise StateError(f"the source has {data.size} bytes, and rows lie at {where}", offset=start)
