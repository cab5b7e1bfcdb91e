"""ggml's own RPC server: lends devices of this machine to one client after the other."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from pykv._native import ffi, lib
from pykv.errors import ParamError
from pykv.ggml.backend import MAX_THREADS, Backend
from pykv.ggml.device import Device


class RPCServer:
    """A server that is ready to run.

    ggml's server believes its clients: whoever reaches the port can use this machine's memory and processor, and may
    end the process by a malformed message. There is no password and no encryption.

    Attributes
    ----------
    host, port : where it will listen; the port is a free one where 0 was asked for.
    devices : what it lends, in the order in which clients count them.

    Parameters
    ----------
    host : an IPv4 address of this machine, or a name of one.
    port : 0 takes a free one.
    devices : the devices to lend; one may be named several times. Not those of another server.
    n_threads : threads of those that compute on the CPU.
    cache : a folder that keeps large tensors between clients, so that the next upload of a model is quick.

    Raises
    ------
    ParamError : an argument that is none, a host or port that cannot be listened on, or a ggml without RPC.
    AllocError : a device cannot be made ready.
    """

    def __init__(
        self,
        host: str,
        port: int,
        devices: Sequence[Device],
        n_threads: int,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if not lib.pykv_rpc_is_built():
            raise ParamError(
                "rpc: this ggml was built without RPC; rebuild libggml-python with -C cmake.define.GGML_RPC=ON"
            )
        if not devices:
            raise ParamError("devices=[] must name at least one device")
        lent = [device.name for device in devices if device.backend == "RPC"]
        if lent:
            raise ParamError(f"devices={lent}: those of another server cannot be lent on")
        if not 1 <= n_threads <= MAX_THREADS:
            raise ParamError(f"n_threads={n_threads} must lie in 1..{MAX_THREADS}")
        if not 0 <= port <= 65535:
            raise ParamError(f"port={port} must lie in 0..65535")
        self.host, self.port = _free(host, port)
        self.devices = tuple(devices)
        self._n_threads, self._cache = n_threads, _folder(cache)
        for device in dict.fromkeys(devices):
            Backend(device).close()  # the server cannot say that it has failed at this

    @property
    def endpoint(self) -> str:
        """What clients connect to."""
        return f"{self.host}:{self.port}"

    @property
    def is_listening(self) -> bool:
        """Whether somebody listens there now; asked without connecting, since a client would be served."""
        try:
            _bound(self.host, self.port).close()
        except OSError:
            return True
        return False

    def serve(self) -> None:
        """Serve clients for as long as the process lives.

        Nothing ends this call but the end of the process; it returns only where the port cannot be listened on.
        ggml writes a line on stdout for each client that comes and goes.
        """
        pointers = ffi.new("ggml_backend_dev_t[]", [device.ptr for device in self.devices])
        cache = ffi.NULL if self._cache is None else ffi.new("char[]", os.fsencode(self._cache))
        lib.pykv_rpc_serve(self.endpoint.encode(), cache, self._n_threads, len(self.devices), pointers)


def _folder(cache: str | os.PathLike[str] | None) -> Path | None:
    if cache is None:
        return None
    folder = Path(cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParamError(f"cache={str(cache)!r} cannot be made: {error.strerror}") from error
    return folder


def _free(host: str, port: int) -> tuple[str, int]:
    """Return the address and the port to listen on."""
    try:
        with _bound(socket.gethostbyname(host), port) as one:
            address, free = one.getsockname()
    except (OSError, UnicodeError) as error:
        raise ParamError(f"host={host!r}, port={port}: cannot be listened on: {error}") from error
    return address, free


def _bound(address: str, port: int) -> socket.socket:
    one = socket.socket()
    try:
        # as the server does: a port whose last connection has just ended may be taken
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((address, port))
    except BaseException:
        one.close()
        raise
    return one
