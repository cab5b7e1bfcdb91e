"""Exceptions on their way between two processes: the same class, the same message, the same attributes."""

from __future__ import annotations

import builtins
from typing import Any

from pykv.isolation.codec import find_class

_OF_OSERROR = ("errno", "strerror", "filename", "filename2")


def told(error: BaseException) -> tuple[Any, ...]:
    """Return an exception as values. One of a class that is neither Python's nor pykv's goes as what it is based on."""
    kind = next(each for each in type(error).__mro__ if _is_known(each))
    args = tuple(getattr(error, name) for name in _OF_OSERROR) if _is_system(kind, error) else error.args
    return kind.__module__, kind.__qualname__, args, dict(vars(error)), str(error)


def again(module: str, name: str, args: tuple[Any, ...], attributes: dict[str, Any], text: str) -> BaseException:
    """Return the exception that was told."""
    kind = getattr(builtins, name, None) if module == "builtins" else find_class(module, name)
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        return RuntimeError(f"{name}: {text}")
    error: BaseException
    if module != "builtins":
        error = _blank(kind, args)
        error.args = args
    elif issubclass(kind, OSError) and len(args) == len(_OF_OSERROR):
        number, what, first, second = args
        error = kind(number, what, first, None, second)
    else:
        try:
            error = kind(*args)
        except TypeError:  # it takes what cannot leave its process
            return RuntimeError(f"{name}: {text}")
    vars(error).update(attributes)
    return error


def _blank(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an exception without its own `__init__`, made by the base that lays it out: of several one alone may."""
    base: type[BaseException] = kind
    while base.__module__ != "builtins":
        base = base.__base__ or BaseException
    return base.__new__(kind, *args)


def _is_known(kind: type) -> bool:
    return kind.__module__ == "builtins" or kind.__module__.partition(".")[0] == "pykv"


def _is_system(kind: type, error: BaseException) -> bool:
    return kind.__module__ == "builtins" and isinstance(error, OSError) and error.errno is not None
