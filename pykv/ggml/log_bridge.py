"""ggml's log lines as Python log records under ``pykv.ggml``."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pykv._native import ffi, lib
from pykv.log import logger

_LOG = logger("pykv.ggml")
_LEVELS = {
    lib.GGML_LOG_LEVEL_DEBUG: logging.DEBUG,
    lib.GGML_LOG_LEVEL_INFO: logging.DEBUG,  # ggml's "info" is chatter to a user of a library
    lib.GGML_LOG_LEVEL_WARN: logging.WARNING,
    lib.GGML_LOG_LEVEL_ERROR: logging.ERROR,
}


class _LineJoiner:
    """Collects the fragments that ggml sends until a line is whole."""

    def __init__(self, emit: Callable[[int, str], None]) -> None:
        self._text, self._level, self._emit = "", logging.DEBUG, emit

    def push(self, level: int, text: str) -> None:
        found = self._level if level == lib.GGML_LOG_LEVEL_CONT else _LEVELS.get(level, logging.DEBUG)
        if found != self._level:
            self._flush("\n")
            self._level = found
        self._flush(text)

    def _flush(self, text: str) -> None:
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            if line.strip():
                self._emit(self._level, line.rstrip())


class _Thread(threading.local):
    """What one thread's lines go through; ggml logs on the thread that called it."""

    def __init__(self) -> None:
        self.joiner = _LineJoiner(self.emit)
        self.caught: list[str] | None = None

    def emit(self, level: int, line: str) -> None:
        if self.caught is not None and level >= logging.ERROR:
            self.caught.append(line)
        else:
            _LOG.log(level, "%s", line)


_THREAD = _Thread()


@contextmanager
def caught_errors() -> Iterator[list[str]]:
    """Collect the error lines that ggml writes on this thread in a ``with`` block, instead of logging them."""
    lines: list[str] = []
    _THREAD.caught = lines
    try:
        yield lines
    finally:
        _THREAD.caught = None


@ffi.def_extern(name="pykv_log_to_python")  # type: ignore[untyped-decorator, unused-ignore]
def _on_log(level: int, text: Any) -> None:
    _THREAD.joiner.push(level, ffi.string(text).decode(errors="replace"))


lib.pykv_install_log()
# a log line that comes while the interpreter goes down would find no Python to call
atexit.register(lib.pykv_remove_log)
