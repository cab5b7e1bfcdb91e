"""ChildProcess: another Python, which shares a region and two sockets with this one, and never outlives it.

It is a fresh interpreter and runs none of the program's own code: no fork, whose threads and locks would be half there,
and no import of ``__main__``, which a prompt or ``python -c`` does not have.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress

from pykv.errors import ParamError
from pykv.isolation.region import Region

_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main(*{fds})"
_PATIENCE = 2.0
"""Seconds that a process may take to end by itself."""

_MOST_WORDS = 4000
_MOST_LINES = 12


class ChildProcess:
    """A process that runs ``main(talk, control, region, parent)`` of a module, all of them numbers.

    Attributes
    ----------
    talk : the socket for requests and replies.
    control : the socket for what cannot wait for a reply; its end is the end of the process.
    region : the shared memory.
    owner : the process that started it. One that was forked from that has no part in it.

    Raises
    ------
    ParamError : this system, or this Python, has no way to start one.
    """

    def __init__(self, module: str) -> None:
        if not is_possible():
            raise ParamError("isolate=True: needs a Python that can be started anew (sys.executable), and Unix sockets")
        self.owner = os.getpid()
        self.region = Region.create()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.talk, talk = socket.socketpair()
        self.control, control = socket.socketpair()
        fds = (talk.fileno(), control.fileno(), self.region.fd)
        try:
            self._process = subprocess.Popen(
                [*_interpreter(), "-c", _BOOT.format(path=_path(), module=module, fds=(*fds, self.owner))],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is for the program, which passes it on
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            talk.close()
            control.close()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once. Safe to call from a signal handler."""
        self._process.kill()

    def close(self) -> None:
        """Let it end, by force if it does not, and let go of all that was shared. Safe to call twice."""
        if os.getpid() != self.owner:
            return
        self._let_go()
        if self._process.returncode is None:
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def bury(self) -> tuple[str, str]:
        """End it at once; return how it ended, and the last lines that it wrote."""
        self._process.kill()
        code = self._process.wait()
        words = self._last_words()
        self._let_go()
        return _ending(code), words

    def _last_words(self) -> str:
        with suppress(OSError, ValueError):
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _MOST_WORDS))
            lines = self._stderr.read().decode(errors="replace").splitlines()
            return "\n".join([line for line in lines if line.strip()][-_MOST_LINES:])
        return ""

    def _let_go(self) -> None:
        self.talk.close()
        self.control.close()
        self.region.close()
        self._stderr.close()


def is_possible() -> bool:
    """Return whether this system can start such a process."""
    return bool(sys.executable) and hasattr(socket, "AF_UNIX") and os.name == "posix"


def _interpreter() -> list[str]:
    """Return the command that starts this Python as it was started; -P: the folder that it is in has no modules."""
    flags = [("-S", sys.flags.no_site), ("-s", sys.flags.no_user_site), ("-E", sys.flags.ignore_environment)]
    return [sys.executable, "-P", *(flag for flag, is_set in flags if is_set)]


def _path() -> list[str]:
    """Return where modules are found, without the folder that a prompt looks into first: it may be gone."""
    return [entry for entry in sys.path if entry]


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
