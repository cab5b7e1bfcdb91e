"""Devices of other machines, reached over the network through ggml's RPC server.

ggml ends the process when a server that it talks to dies or answers wrongly, so who answers is looked at first.
"""

from __future__ import annotations

import re
import socket
import struct

from pykv._native import ffi, lib
from pykv.errors import ParamError
from pykv.ggml.device import Device, devices

# the first message of ggml-rpc.cpp: RPC_CMD_HELLO, its size, and what the connection can do: nothing but TCP
_CAPS = bytes(24)
_HELLO = struct.pack("<BQ", 14, len(_CAPS)) + _CAPS
_REPLY = struct.Struct("<Q3Bx")


def connect_rpc(endpoint: str, timeout: float = 5.0) -> tuple[Device, ...]:
    """Connect to an RPC server and add its devices to `devices()`; returns them.

    They are named "RPC0" and so on, and count as GPUs: from now on `Model.load` takes them unless told otherwise.
    A server that has been connected before is not asked again. All devices of one server share one connection: use
    them from one thread at a time, whatever the contexts.

    Parameters
    ----------
    endpoint : "host:port", where llama.cpp's ``rpc-server`` listens. There is no encryption and no password.
    timeout : seconds to wait for the first answer. Later ones are waited for without end, and the death of a server
        whose devices are in use ends this process.

    Raises
    ------
    ParamError : this ggml was built without RPC, or no server answers there, or it serves somebody else: one client
        at a time.
    """
    address = _parse(endpoint)
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ParamError(f"timeout={timeout!r} must be a positive number of seconds")
    known = _connected(endpoint)
    if known:
        return known
    if not lib.pykv_rpc_is_built():
        raise ParamError(
            f"endpoint={endpoint!r}: this ggml was built without RPC; rebuild libggml-python with "
            "-C cmake.define.GGML_RPC=ON"
        )
    version = _greet(endpoint, address, timeout)
    registry = lib.pykv_rpc_add_server(endpoint.encode())
    if registry == ffi.NULL:
        raise ParamError(
            f"endpoint={endpoint!r}: the server speaks version {version}, which this ggml refuses, or has no device"
        )
    for i in range(lib.ggml_backend_reg_dev_count(registry)):
        # asked while the server is known to answer; ggml remembers it
        lib.ggml_backend_dev_buffer_type(lib.ggml_backend_reg_dev_get(registry, i))
    lib.ggml_backend_register(registry)
    return _connected(endpoint)


REMOTE = "rpc://"
"""How the names of remote devices begin."""


def is_remote(name: object) -> bool:
    """Return whether this is the name of devices of an RPC server: "rpc://host:port", or one: "rpc://host:port/0"."""
    return isinstance(name, str) and name.lower().startswith(REMOTE)


def remote_devices(name: str) -> tuple[Device, ...]:
    """Return the devices that a remote name stands for, connecting to their server where that has not been done.

    Raises
    ------
    ParamError : see `connect_rpc`; or the server has no device of that number.
    """
    endpoint, is_one, number = name[len(REMOTE) :].partition("/")
    if is_one and not number.isdecimal():
        raise ParamError(f"devices: {name!r} must be rpc://host:port, or rpc://host:port/N for its device N")
    found = connect_rpc(endpoint)
    if not is_one:
        return found
    if int(number) >= len(found):
        raise ParamError(f"devices: {name!r}: the server has {len(found)} devices, the first is 0")
    return (found[int(number)],)


def _connected(endpoint: str) -> tuple[Device, ...]:
    return tuple(device for device in devices() if device.backend == "RPC" and device.description == endpoint)


def _parse(endpoint: str) -> tuple[str, int]:
    match = re.fullmatch(r"([^\s:]+):([0-9]{1,5})", endpoint) if isinstance(endpoint, str) else None
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ParamError(f'endpoint={endpoint!r} must be "host:port"')
    return match[1], int(match[2])


def _greet(endpoint: str, address: tuple[str, int], timeout: float) -> str:
    """Return the protocol version of the server there, after a handshake as ggml makes it."""
    try:
        with socket.create_connection(address, timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(_HELLO)
            with connection.makefile("rb") as stream:
                reply = stream.read(_REPLY.size + len(_CAPS))
    except TimeoutError as error:
        raise ParamError(
            f"endpoint={endpoint!r}: no answer within {timeout:g} s; a server serves one client at a time"
        ) from error
    except (OSError, UnicodeError) as error:
        raise ParamError(f"endpoint={endpoint!r}: no server answers: {error}") from error
    n_bytes, *version = _REPLY.unpack(reply[: _REPLY.size].ljust(_REPLY.size, b"\0"))
    if len(reply) < _REPLY.size + len(_CAPS) or n_bytes != len(reply) - 8:
        raise ParamError(f"endpoint={endpoint!r}: what listens there is no RPC server that this ggml understands")
    return ".".join(map(str, version))
