"""The other side of a `Link`: a loop that serves requests until the program goes away.

What the program would see in its own process it sees here too: exceptions, warnings, log records.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from typing import Any

from pykv.errors import AllocError
from pykv.isolation import raised
from pykv.isolation.channel import Channel
from pykv.isolation.codec import Ref
from pykv.isolation.region import Region

_LOOK = 2.0
"""Seconds between two looks at whether the program is still there, beside what its socket tells."""


class RaisedByCaller(BaseException):
    """A function of the caller's has raised; what, only the caller knows."""


class Service:
    """Serves one program.

    Attributes
    ----------
    region : the shared memory, for what a request writes there.
    """

    def __init__(self, talk: int, control: int, region: int, parent: int, resolve: Callable[[Ref], Any]) -> None:
        self._channel = Channel(socket.socket(fileno=talk), Region(region), None, resolve)
        self.region = self._channel.region
        self._control, self._parent = socket.socket(fileno=control), parent
        self._sends = threading.Lock()  # log records come from other threads too
        self._switch, self._running, self._number, self._unwanted = threading.Lock(), False, 0, 0
        self._stop: Callable[[bool], None] = lambda on: None

    def run(self, handle: Callable[..., Any], drop: Callable[[int], None]) -> None:
        """Serve until the program is gone; never returns.

        Parameters
        ----------
        handle : called with what was asked.
        drop : called with the number of each object that the program has let go.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._watch, daemon=True).start()
        self._pass_on()
        while True:
            try:
                dropped, request = self._channel.receive()
            except (EOFError, OSError):
                os._exit(0)
            with self._switch:
                self._number, self._running = self._number + 1, True
            for number in dropped:
                drop(number)
            try:
                reply: tuple[Any, ...] = ("=", handle(*request))
            except RaisedByCaller:
                reply = ("caller",)
            except BaseException as error:
                reply = ("!", *raised.told(error))
            with self._switch:
                self._running = False
                self._stop(False)
                self._stop = lambda on: None
            self._send(reply)

    def stoppable(self, stop: Callable[[bool], None]) -> None:
        """Say what stops the present request: called with True to stop it, and with False once it has ended."""
        with self._switch:
            self._stop = stop
            if self._unwanted == self._number:
                stop(True)

    def call_back(self, *args: Any) -> None:
        """Call the caller's function; raises what stands for its exception."""
        if not self._ask("call_back", args):
            raise RaisedByCaller

    def _ask(self, name: str, args: tuple[Any, ...]) -> bool:
        """Return whether what was called in the program returned; if not, it raised."""
        with self._sends:
            self._channel.send(("?", name, args))
            return bool(self._channel.receive() == "=")

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            packed = self._channel.packed(message)
        except AllocError as error:
            packed = self._channel.packed(("!", *raised.told(error)))
        try:
            with self._sends:
                self._channel.post(packed)
        except (EOFError, OSError):
            os._exit(0)

    def _watch(self) -> None:
        """Wait for the wish to stop a request, and for the end of the program, however long a request takes."""
        while True:
            ready, _, _ = select.select([self._control], [], [], _LOOK)
            asked = self._control.recv(8) if ready else None
            if asked == b"" or os.getppid() != self._parent:
                os.kill(os.getpid(), signal.SIGKILL)
            with self._switch:
                if asked:
                    self._unwanted = int.from_bytes(asked, "little")
                if asked and self._running and self._unwanted == self._number:
                    self._stop(True)

    def _pass_on(self) -> None:
        """Let warnings and log records reach the program."""

        def warn(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
            if not self._ask("warn", (category.__module__, category.__qualname__, str(message))):
                raise category(str(message))  # the program has made it an error

        warnings.simplefilter("always")
        warnings.showwarning = warn
        log = logging.getLogger("pykv")
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.addHandler(_Sender(self._send))


class _Sender(logging.Handler):
    """Sends log records to the program."""

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._send_on = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send_on(("log", record.name, record.levelno, record.getMessage()))
