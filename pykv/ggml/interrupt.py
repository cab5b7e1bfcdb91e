"""Ctrl-C that waits for a safe place: while held back it sets a cancel flag, afterwards it is delivered."""

from __future__ import annotations

import signal
import threading
from types import TracebackType

from pykv._native import lib
from pykv.ggml.backend import CancelFlag


class HeldInterrupt:
    """Hold Ctrl-C back in a ``with`` block of the main thread; elsewhere, and inside another block, do nothing.

    The handler is C code, so it also works while Python waits for a long computation. On leaving, the program's
    own handler runs if Ctrl-C came: by default that raises KeyboardInterrupt.
    """

    _is_held = False  # there is one Ctrl-C in a process

    def __init__(self, flag: CancelFlag) -> None:
        self._flag, self._holds = flag, False

    def __enter__(self) -> None:
        if not HeldInterrupt._is_held and threading.get_ident() == threading.main_thread().ident:
            self._holds = HeldInterrupt._is_held = bool(lib.pykv_interrupt_defer(self._flag.cell))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._holds:
            return
        came = lib.pykv_interrupt_restore()
        self._holds = HeldInterrupt._is_held = False
        if came:
            self._flag.clear()
            signal.raise_signal(signal.SIGINT)
