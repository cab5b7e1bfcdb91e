"""Ctrl-C while a program waits for another process: a wish to stop at first, an order when it comes again."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Protocol


class Stoppable(Protocol):
    """What is waited for."""

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        ...

    def stop(self, *, at_once: bool) -> None:
        """Ask for an end of what is done now, or force it."""
        ...


class Patience:
    """Takes Ctrl-C as a wish to stop, and a second one as an order; the program hears of it afterwards.

    Entered around a request; does nothing in other threads than the main one.
    """

    __slots__ = ("_at_once", "_handler", "_link", "_times")

    def __init__(self, link: Stoppable, at_once: bool) -> None:
        self._link, self._at_once, self._times = link, at_once, 0
        self._handler: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if handler not in (None, signal.SIG_IGN):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hear)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._times:
                signal.raise_signal(signal.SIGINT)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._link.is_mine:  # another thread has the turn: this one only waits for it
            if callable(self._handler):
                self._handler(number, frame)
            return
        self._times += 1
        self._link.stop(at_once=self._at_once or self._times > 1)
