"""ggml's RPC server in a process of its own, on loopback."""

from __future__ import annotations

import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.child import child_environment, python_command

HELLO = struct.pack("<BQ24x", 14, 24)
"""What a client says first: a command, the bytes that follow, and that it knows no way but TCP."""

WELCOME = struct.pack("<Q4B24x", 28, 5, 0, 0, 0)
"""What a server of protocol 5.0.0 answers."""

HERE = Path(__file__).parent
_SECONDS_TO_START = 60


@dataclass(frozen=True)
class Server:
    """A server that listens on loopback."""

    endpoint: str
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.endpoint.split(":")
        return host, int(port)


@contextmanager
def rpc_server(n_devices: int = 2) -> Iterator[Server]:
    """Run a server on a free port of 127.0.0.1, which offers the CPU so many times."""
    with tempfile.TemporaryFile() as log:
        for _ in range(3):  # somebody else may take the port in between
            endpoint = f"127.0.0.1:{_free_port()}"
            command = python_command(str(HERE / "rpc_server.py"), endpoint, str(n_devices))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=child_environment())
            server = Server(endpoint, process)
            try:
                if _listens(server):
                    yield server
                    return
            finally:
                process.terminate()
                process.wait(timeout=30)
        log.seek(0)
        raise AssertionError(f"the RPC server does not start: {log.read().decode(errors='replace')}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _listens(server: Server) -> bool:
    """Wait until the server listens; False if it has ended."""
    deadline = time.monotonic() + _SECONDS_TO_START
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(server.address, 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return True
    return False


@contextmanager
def occupied(server: Server) -> Iterator[None]:
    """Be the one client that the server serves."""
    with socket.create_connection(server.address, 30) as connection:
        connection.sendall(HELLO)
        with connection.makefile("rb") as stream:
            assert len(stream.read(len(WELCOME))) == len(WELCOME)
        yield


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """Listen on loopback; give each client that reply and close, or for None say nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as silent:

        def serve() -> None:
            while True:
                try:
                    connection = silent.enter_context(listener.accept()[0])
                except OSError:
                    return  # the listener is closed
                if reply is not None:
                    with connection.makefile("rb") as stream:
                        stream.read(len(HELLO))
                    connection.sendall(reply)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
