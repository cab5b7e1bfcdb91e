"""What surrounds every verb and every read of a memory: it must be open, and one call is inside at a time.

Listeners are told of verbs. A memory made of parts enters once, and takes the steps of its parts without all this.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pykv.memory.guard import Guard

Listener = Callable[[str, tuple[object, ...], object], None]
"""Called with a verb's name, all its arguments in order, and what it returned or the exception that it raises."""


class HasReads(Protocol):
    """What `read` needs of a memory."""

    guard: Guard

    def require_open(self) -> None:
        """Raise if it is closed."""
        ...


class HasVerbs(HasReads, Protocol):
    """What `verb` needs of a memory."""

    listeners: list[Listener]


D = TypeVar("D", bound=HasReads)
S = TypeVar("S", bound=HasVerbs)
P = ParamSpec("P")
R = TypeVar("R")


def verb(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method a verb.

    Raises
    ------
    ParamError : by the verb, where the memory is a part of another one.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.require_open()
        self.guard.require_whole(method.__name__)
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


def read(method: Callable[Concatenate[D, P], R]) -> Callable[Concatenate[D, P], R]:
    """Make a method a read of what a change may have half done: it changes nothing that a caller sees."""

    @functools.wraps(method)
    def guarded(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.require_open()
        with self.guard:
            return method(self, *args, **kwargs)

    return guarded


def step(call: Callable[P, R]) -> Callable[P, R]:
    """Return what a verb or read of a part does, as a step of one of the whole.

    For who has entered the guard of the whole. It is passed on by the caller, and not found in the thread: what runs
    there may be a signal handler that interrupts the whole.
    """
    inside, of = getattr(call, "__wrapped__", None), getattr(call, "__self__", None)
    return call if inside is None or of is None else functools.partial(inside, of)
