"""ggml's log lines as Python log records under ``pykv.ggml``."""

from __future__ import annotations

import atexit
import logging
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

    def __init__(self) -> None:
        self._text, self._level = "", logging.DEBUG

    def push(self, level: int, text: str) -> None:
        if level != lib.GGML_LOG_LEVEL_CONT:
            self._level = _LEVELS.get(level, logging.DEBUG)
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            if line.strip():
                _LOG.log(self._level, "%s", line.rstrip())


_JOINER = _LineJoiner()


@ffi.def_extern(name="pykv_log_to_python")  # type: ignore[untyped-decorator, unused-ignore]
def _on_log(level: int, text: Any) -> None:
    _JOINER.push(level, ffi.string(text).decode(errors="replace"))


lib.pykv_install_log()
# a log line that comes while the interpreter goes down would find no Python to call
atexit.register(lib.pykv_remove_log)
