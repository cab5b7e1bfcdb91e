"""Link: what a program has of the process of its model. One request at a time, and it never waits for ever.

While it waits, the process may ask back: for the answer of a function of the caller's, or whether a warning is an
error here. Ctrl-C asks the process to stop what it does; a second one ends it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pykv.errors import BackendLost, ConcurrentUseError, UseAfterCloseError
from pykv.isolation import raised
from pykv.isolation.channel import Channel
from pykv.isolation.patience import Patience
from pykv.isolation.process import ChildProcess
from pykv.isolation.warned import warn_again

_SETTLE = 5.0
"""Seconds that a request may take to end once the program has given it up."""


class Link:
    """Requests to a process, in turns.

    Parameters
    ----------
    module : whose ``main`` serves them.
    devices : names of the devices that it computes on, for `BackendLost`.
    """

    def __init__(self, module: str, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self.lost: BackendLost | None = None
        self._process = ChildProcess(module)
        self._channel = Channel(self._process.talk, self._process.region, self)
        self._turn, self._thread = threading.Lock(), 0
        self._number, self._closed = 0, False
        self._dropped: list[int] = []

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Whether there is nobody to ask any more."""
        return self._closed or self.lost is not None

    @property
    def region(self) -> Any:
        """The shared memory, for who has the turn."""
        return self._channel.region

    def ask(
        self,
        *request: Any,
        call_back: Callable[..., object] | None = None,
        at_once: bool = False,
        begun: Callable[[int], None] | None = None,
        take: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Send a request; return what it came to.

        Parameters
        ----------
        call_back : the caller's function, which the process may call meanwhile.
        at_once : Ctrl-C ends the process, which has nothing yet that would be lost.
        begun : called with the number of the request, once it can be cancelled.
        take : a function of the reply, which looks at the region before anybody else has a turn.

        Raises
        ------
        BackendLost : the process has ended.
        ConcurrentUseError : this thread is amid a request, which a signal handler interrupts.
        """
        with Patience(self, at_once):
            self._take_turn()
            try:
                return self._exchange(request, call_back, begun, take)
            finally:
                self._thread = 0
                self._turn.release()

    def cancel(self, number: int) -> None:
        """Ask the process to stop a request, soon; no effect on any other."""
        with suppress(OSError):
            self._process.control.send(number.to_bytes(8, "little"))

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._thread == threading.get_ident()

    def stop(self, *, at_once: bool) -> None:
        """Ask the process to stop what it does, or end it. For who has the turn; in a signal handler too."""
        if at_once:
            self._process.kill()
        else:
            self.cancel(self._number)

    def drop(self, number: int) -> None:
        """Let the process forget an object, with the next request. For finalizers, which run anywhere."""
        self._dropped.append(number)

    def close(self) -> None:
        """End the process. Safe to call twice.

        Raises
        ------
        ConcurrentUseError : a request is under way.
        """
        if self.closed:
            self._closed = True
            return
        if not self._turn.acquire(blocking=False):
            raise ConcurrentUseError("the model is in use: a context of it decodes or changes; cancel() it first")
        try:
            self._closed = True
            self._process.close()
        finally:
            self._turn.release()

    def end(self) -> None:
        """End the process whatever it does. For the end of the program, and of a model that nobody holds."""
        if os.getpid() == self._process.owner and not self.closed:
            self._closed = True
            self._process.bury()

    def require_open(self) -> None:
        """Raise `BackendLost` or `UseAfterCloseError` if nobody can be asked."""
        if self._closed:
            raise UseAfterCloseError("the model is closed")
        if self.lost is not None:
            raise BackendLost(str(self.lost), devices=self.lost.devices, last_words=self.lost.last_words)

    def _outcome(self, call_back: Callable[..., object] | None) -> tuple[Any, BaseException | None]:
        """Return what a request came to: a reply or an exception."""
        failed: BaseException | None = None
        while True:
            kind, *rest = self._received()
            if kind == "=":
                return rest[0], None
            if kind == "!":
                return None, raised.again(*rest)
            if kind == "caller":
                return None, failed
            if kind == "log":
                _log(*rest)
                continue
            try:
                self._answered(rest[0], rest[1], call_back)
                answer = "="
            except BaseException as error:
                failed, answer = error, "!"
            self._channel.send(answer)

    def _received(self) -> tuple[Any, ...]:
        message = self._channel.receive()
        if not isinstance(message, tuple) or not message:
            raise EOFError(f"a message that makes no sense: {message!r}")
        return message

    def _answered(self, name: str, args: tuple[Any, ...], call_back: Callable[..., object] | None) -> None:
        if name == "warn":
            warn_again(*args)
        elif call_back is not None:
            call_back(*args)

    def _take_turn(self) -> None:
        if self.is_mine:
            raise ConcurrentUseError("the model is in use by this thread, in what this call interrupts")
        if os.getpid() != self._process.owner:
            raise ConcurrentUseError(f"the model belongs to process {self._process.owner}; load it in this one too")
        self._turn.acquire()
        try:
            self.require_open()
            self._thread, self._number = threading.get_ident(), self._number + 1
        except BaseException:
            self._turn.release()
            raise

    def _exchange(
        self,
        request: tuple[Any, ...],
        call_back: Callable[..., object] | None,
        begun: Callable[[int], None] | None,
        take: Callable[[Any], Any] | None,
    ) -> Any:
        """Do what `ask` does, for who has the turn."""
        dropped, self._dropped = self._dropped, []
        message = self._channel.packed((dropped, request))
        try:
            self._channel.post(message)
            if begun is not None:
                begun(self._number)
            reply, error = self._outcome(call_back)
        except (EOFError, OSError, LookupError) as gone:  # it has ended, or says what makes no sense
            raise self._mourn() from gone
        except BaseException:  # of a signal handler: the program gives this request up
            self._settle()
            raise
        if error is not None:
            raise error
        return reply if take is None else take(reply)

    def _settle(self) -> None:
        """Let a request that was given up come to its end, so that the next one does not get its reply."""
        self.cancel(self._number)
        try:
            self._channel.settimeout(_SETTLE)
            while (kind := self._received()[0]) not in ("=", "!", "caller"):
                if kind == "?":
                    self._channel.send("!")
            self._channel.settimeout(None)
        except (EOFError, OSError):
            self._mourn()

    def _mourn(self) -> BackendLost:
        """Note that the process is gone, and return what is to be said of it."""
        how, words = self._process.bury()
        told = f":\n  {words.replace(chr(10), chr(10) + '  ')}\n" if words else ". "
        self.lost = BackendLost(
            f"the process that computed on {', '.join(self.devices) or 'the device'} has ended ({how}){told}"
            "The model and its contexts are closed. Load the model anew on devices that answer, and a saved state "
            "into a context of it, to go on from there.",
            devices=self.devices,
            last_words=words,
        )
        return self.lost


def _log(name: str, level: int, text: str) -> None:
    logging.getLogger(name).log(level, "%s", text)
