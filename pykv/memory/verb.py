"""What surrounds every verb of a memory: it must be open, one thread is inside at a time, and listeners are told."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pykv.memory.guard import Guard

Listener = Callable[[str, tuple[object, ...], object], None]
"""Called with a verb's name, all its arguments in order, and what it returned or the exception that it raises."""


class HasVerbs(Protocol):
    """What `verb` needs of a memory."""

    guard: Guard
    listeners: list[Listener]

    def require_open(self) -> None:
        """Raise if it is closed."""
        ...


S = TypeVar("S", bound=HasVerbs)
P = ParamSpec("P")
R = TypeVar("R")


def verb(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method a verb."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.require_open()
        with self.guard:
            if not self.listeners:
                return method(self, *args, **kwargs)
            try:
                outcome = method(self, *args, **kwargs)
            except Exception as error:
                tell(self, args, kwargs, error)
                raise
            tell(self, args, kwargs, outcome)
            return outcome

    def tell(self: S, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: object) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # no such call, says `outcome`
            return
        bound.apply_defaults()
        for listener in tuple(self.listeners):
            listener(method.__name__, tuple(bound.arguments.values())[1:], outcome)

    return guarded
