"""What contexts give out, where they are in another process: snapshots, recordings and observers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TypeVar

from pykv.errors import BackendLost, UseAfterCloseError
from pykv.isolation import Link, Ref
from pykv.memory import AttentionMass
from pykv.runtime.isolated.remote import RemoteObject
from pykv.runtime.observe import Observation

_T = TypeVar("_T")


class Given(RemoteObject):
    """One of them. Close it, or use it in ``with``; with the model it is closed too."""

    def __init__(self, link: Link, ref: Ref) -> None:
        self._bind(link, ref)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._or_gone("closed", True)

    def close(self) -> None:
        """End it. Safe to call twice."""
        if not self.home.closed:
            self._call("close")

    def keep(self) -> None:
        """Bring over what the context, which is about to close, has still noted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _or_gone(self, name: str, gone: _T) -> _T:
        """Return an attribute, or what it is once the process has ended."""
        try:
            value: _T = self._get(name)
        except (BackendLost, UseAfterCloseError):
            return gone
        return value


class IsolatedSnapshot(Given):
    """Offers what `Snapshot` does, to all contexts of its model; it does not outlive the model.

    Attributes
    ----------
    position : where decoding goes on, 0 for an empty sequence.
    on : where the copies lie: "host" or "device".
    """

    def __init__(self, link: Link, ref: Ref, on: str) -> None:
        super().__init__(link, ref)
        self.position: int = self._get("position")
        self.on = on

    @property
    def nbytes(self) -> int:
        """Bytes of the copied rows; 0 where all can be cut, and once closed."""
        return self._or_gone("nbytes", 0)

    def __repr__(self) -> str:
        return f"Snapshot(position={self.position}, on={self.on!r}, nbytes={self.nbytes})"


class IsolatedTrace(Given):
    """Offers what `Trace` does: the process of the model writes the file.

    Attributes
    ----------
    path : the file.
    """

    def __init__(self, link: Link, ref: Ref) -> None:
        super().__init__(link, ref)
        self.path: Path = self._get("path")
        self._n_steps = 0

    @property
    def n_steps(self) -> int:
        """Steps written so far."""
        self._n_steps = self._or_gone("n_steps", self._n_steps)
        return self._n_steps


class IsolatedObserver(Given):
    """Offers what `Observer` does.

    Attributes
    ----------
    layers : the layers that are observed, ascending.
    what : which part of their attention.
    """

    def __init__(self, link: Link, ref: Ref) -> None:
        super().__init__(link, ref)
        self.layers: tuple[int, ...] = self._get("layers")
        self.what: AttentionMass = self._get("what")
        self._taken: deque[Observation] = deque()

    def __iter__(self) -> Iterator[Observation]:
        while True:
            self.keep()
            if not self._taken:
                return
            yield self._taken.popleft()

    def keep(self) -> None:
        """Bring over what has been noted."""
        if not self.home.closed:
            self._taken.extend(self.home.ask("take", self.ref.number))
