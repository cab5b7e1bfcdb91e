"""Lifetimes: objects that own something in C, freed once, after all that stands on them.

An owner has ``close()``, works in ``with``, and frees itself when collected. Children hold their parents
strongly and parents count their children: a parent that is closed early refuses further use at once, and
its memory goes when the last child lets go. Parents never hold children.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

from pykv.errors import UseAfterCloseError


def _freed(_: Any) -> None:
    raise AssertionError("freed twice")


class _Claim:
    """The C pointer and the count of those who need it; freed when nobody does. Open until its owner lets go."""

    __slots__ = ("free", "holders", "is_open", "parents", "ptr")

    def __init__(self, ptr: Any, free: Callable[[Any], None], parents: tuple[_Claim, ...]) -> None:
        self.ptr, self.free, self.parents, self.holders, self.is_open = ptr, free, parents, 1, True
        for parent in parents:
            parent.holders += 1

    def close(self) -> None:
        self.is_open = False
        self.release()

    def release(self) -> None:
        self.holders -= 1
        if self.holders == 0:
            free, self.free = self.free, _freed  # what it kept alive goes too
            free(self.ptr)
            for parent in self.parents:
                parent.release()


class Owner:
    """Base of everything that must be freed.

    Subclasses call `_own` once, at the end of ``__init__``.
    """

    _claim: _Claim
    _finalizer: weakref.finalize[Any, Any]

    def _own(self, ptr: Any, free: Callable[[Any], None], *parents: Owner) -> None:
        if any(parent.closed for parent in parents):
            free(ptr)
            raise UseAfterCloseError(f"{type(self).__name__}: something that it stands on is closed")
        self._claim = _Claim(ptr, free, tuple(parent._claim for parent in parents))
        self._finalizer = weakref.finalize(self, self._claim.close)

    def lend_to(self, user: object) -> None:
        """Keep the C object until `user` is gone, also if this is closed before."""
        self._claim.holders += 1
        weakref.finalize(user, self._claim.release)

    @property
    def ptr(self) -> Any:
        """The C pointer.

        Raises
        ------
        UseAfterCloseError : the object was closed.
        """
        claim = self._claim
        if not claim.is_open:
            raise UseAfterCloseError(f"{type(self).__name__} is closed")
        return claim.ptr

    @property
    def closed(self) -> bool:
        return not self._claim.is_open

    def close(self) -> None:
        """Let go of the C object. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        _ = self.ptr
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
