"""Snapshot: the part of a sequence that cannot be cut back, kept so that decoding can go on there once more.

A cut brings back neither what a window has overwritten nor an earlier state; rows that a cut can reach are not copied.
Source: spec session.md sections 5.3 and 5.4.

    kind of memory      copied
    full attention      nothing: restoring cuts back
    a window            the rows that a next token sees
    states              the rows of the sequence, R and S
    several of them     each as it applies
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, Self

from pykv.cells import Undo
from pykv.cells.arguments import sequence_id, shown
from pykv.errors import ParamError, UseAfterCloseError
from pykv.memory.guard import Guard
from pykv.memory.verb import Listener, verb

Write = Callable[[], None]
"""Writes the rows of what has been placed."""


class Piece(Protocol):
    """What a snapshot holds of one memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copied rows."""
        ...

    def check(self, memory: Any, seq_id: int) -> None:
        """Raise `ParamError` if a sequence lacks what was not copied. Changes nothing."""
        ...

    def place(self, memory: Any, seq_id: int) -> Write:
        """Let a sequence end where the snapshot does. Mutates the bookkeeping only; returns what writes the rows."""
        ...

    def close(self) -> None:
        """Free the copies."""
        ...


class Snapshot:
    """What `Memory.restore` needs to let a sequence go on at `position` once more. Close it, or use it in ``with``.

    It does not change, and outlives the memory. It says nothing about rows that a cut can reach: those must still be
    there when it is restored. It is stale, and refused, once the sequence has there

    * fewer or more tokens below `position`, or others; tokens that were decoded anew count as the same,
    * moved by `seq_add` or `seq_div` since: their keys were turned, which rounds, and the copied rows were not.

    Not detected: other embeddings at the same positions, which have no token, and data that was written from outside.

    Made by `Memory.snapshot`.
    """

    def __init__(self, piece: Piece, layout: object, position: int, on: str) -> None:
        self._piece, self._layout, self._position, self._on = piece, layout, position, on
        self._closed = False

    @property
    def position(self) -> int:
        """Where decoding goes on, 0 for an empty sequence."""
        return self._position

    @property
    def on(self) -> str:
        """Where the copies lie: "host" or "device"."""
        return self._on

    def __repr__(self) -> str:
        return f"Snapshot(position={self.position}, on={self.on!r}, nbytes={self.nbytes})"

    @property
    def nbytes(self) -> int:
        """Bytes of the copied rows; 0 where all can be cut, and once closed."""
        return self._piece.nbytes

    @property
    def closed(self) -> bool:
        """Whether the copies are gone."""
        return self._closed

    def fitting(self, layout: object) -> Piece:
        """Return what it holds, for a memory of that layout.

        Raises
        ------
        UseAfterCloseError : it is closed.
        ParamError : it was taken of a memory that stores something else.
        """
        if self._closed:
            raise UseAfterCloseError("the snapshot is closed")
        if layout != self._layout:
            raise ParamError(
                f"snapshot={self!r}: was taken of a memory of another kind, or one whose layers, types or window differ"
            )
        return self._piece

    def close(self) -> None:
        """Free the copies. Safe to call twice."""
        self._closed = True
        self._piece.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Snapshots(ABC):
    """A memory whose sequences can be kept and put back."""

    guard: Guard
    listeners: list[Listener]

    def snapshot(self, seq_id: int, *, on: str = "host") -> Snapshot:
        """Keep what a cut could not bring back of a sequence as it is now. Carries out what is queued.

        Parameters
        ----------
        on : "host" for the process's memory, "device" for buffers beside the tensors that are copied.

        Raises
        ------
        AllocError : a device lacks the memory.
        BatchError, ParamError : decoding could not go on at the end of the sequence now.
        """
        self.require_open()
        seq_id = sequence_id("seq_id", seq_id, self.n_seq_max)
        if on not in ("host", "device"):
            raise ParamError(f"on={shown(on)}: must be 'host' or 'device'")
        with self.guard:
            self.follow()
            position = self.pos_max(seq_id) + 1
            return Snapshot(self.take(seq_id, position, on), self.snapshot_layout, position, on)

    @verb
    def restore(self, seq_id: int, snapshot: Snapshot) -> None:
        """Let a sequence end where a snapshot was taken, of it or of another one that began with the same tokens.

        Decoding at ``snapshot.position`` then gives what it gave after the snapshot: to the bit where the copied cells
        find their places free, other sequences hold what they held and V lies as it lay, else in another order of
        sums. What the sequence held from there on is gone; its state is the latest only, with none to go back to.

        Raises
        ------
        ParamError : it was taken of a memory that stores something else, or is stale; the message tells what is
            missing. See `Snapshot`. Nothing has changed.
        NoSlotError : a window cache has no room. Nothing has changed.
        UseAfterCloseError : the snapshot is closed.
        """
        seq_id = sequence_id("seq_id", seq_id, self.n_seq_max)
        if not isinstance(snapshot, Snapshot):
            raise ParamError(f"snapshot={shown(snapshot)}: must be a Snapshot")
        piece = snapshot.fitting(self.snapshot_layout)
        self.follow()
        piece.check(self, seq_id)
        undo = self.bookmark()
        try:
            write = piece.place(self, seq_id)
        except BaseException:
            undo()
            raise
        write()  # at last: what it overwrites could not be had again

    @property
    @abstractmethod
    def n_seq_max(self) -> int:
        """Sequences."""

    @property
    @abstractmethod
    def snapshot_layout(self) -> object:
        """What must be equal for a snapshot to fit."""

    @abstractmethod
    def take(self, seq_id: int, position: int, on: str) -> Piece:
        """Copy what a token at `position`, the end of a sequence, could not be given by a cut."""

    @abstractmethod
    def require_open(self) -> None:
        """Raise `UseAfterCloseError` if it is closed."""

    @abstractmethod
    def follow(self) -> None:
        """Carry out queued changes of stored data."""

    @abstractmethod
    def pos_max(self, seq_id: int) -> int:
        """Return the largest position of a sequence, -1 if it is empty."""

    @abstractmethod
    def bookmark(self) -> Undo:
        """Return what puts the bookkeeping back to what it is now."""


class CanKeep(Protocol):
    """A memory that can stand in another one and be kept with it."""

    def take(self, seq_id: int, position: int, on: str) -> Piece:
        """See `Snapshots.take`."""
        ...


class PartsPiece:
    """What a snapshot holds of each part of a memory."""

    def __init__(self, parts: Sequence[CanKeep], seq_id: int, position: int, on: str) -> None:
        with ExitStack() as begun:
            self._pieces: list[Piece] = []
            for part in parts:
                piece = part.take(seq_id, position, on)
                begun.callback(piece.close)
                self._pieces.append(piece)
            begun.pop_all()

    @property
    def nbytes(self) -> int:
        """Bytes of the copied rows."""
        return sum(piece.nbytes for piece in self._pieces)

    def check(self, memory: Any, seq_id: int) -> None:
        """See `Piece.check`."""
        for piece, part in zip(self._pieces, memory.parts, strict=True):
            piece.check(part, seq_id)

    def place(self, memory: Any, seq_id: int) -> Write:
        """See `Piece.place`."""
        writes = [piece.place(part, seq_id) for piece, part in zip(self._pieces, memory.parts, strict=True)]

        def write() -> None:
            for each in writes:
                each()

        return write

    def close(self) -> None:
        """Free the copies."""
        for piece in self._pieces:
            piece.close()
