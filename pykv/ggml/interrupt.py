"""Ctrl-C that waits for a safe place: while held back it sets a cancel flag, afterwards it is delivered."""

from __future__ import annotations

import signal
import threading
from types import TracebackType

from pykv._native import lib
from pykv.ggml.backend import CancelFlag


class HeldInterrupt:
    """Hold Ctrl-C back in a ``with`` block of the main thread; elsewhere do nothing.

    The handler is C code, so it also works while Python waits for a long computation. On leaving, the program's
    own handler runs if Ctrl-C came: by default that raises KeyboardInterrupt.
    """

    def __init__(self, flag: CancelFlag) -> None:
        self._flag, self._held = flag, False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._held = bool(lib.pykv_interrupt_defer(self._flag.cell))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._held and lib.pykv_interrupt_restore():
            self._flag.clear()
            signal.raise_signal(signal.SIGINT)
